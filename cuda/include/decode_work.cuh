// The work of decode attention: how a row's context is cut into splits, each worked on by itself, and
// the list of them, which prepare_decode writes once a step and all layers read.
//
// The cuts lie at absolute positions and depend on the row's own context alone; their number is at
// most MAX_SPLITS.
#pragma once

#include "common.cuh"

constexpr int SHORTEST_SPLIT = 128;
constexpr int MAX_SHORTEST = 32;  // splits, after which they are longer: each leaves 1 KiB a head
constexpr int MAX_SPLITS = 64;

__device__ inline int split_length(int context) {
    int length = context > SHORTEST_SPLIT * MAX_SHORTEST ? 2 * SHORTEST_SPLIT : SHORTEST_SPLIT;
    while (length * MAX_SPLITS < context) length *= 2;
    return length;
}

// One split as it lies in the list: from position `begin` of a row's context, whose KV blocks are
// those of `slot`.
struct alignas(16) WorkItem {
    int row, begin, context, slot;
};

// One split for one KV head: positions [begin, end).
struct Item {
    int row, kv_head, begin, end, context, slot;

    __device__ bool exists() const { return end > 0; }
    __device__ bool has_newest() const { return end == context; }
};

struct WorkList {
    const WorkItem* items;
    int num_items, NKV;

    // Splits in order, all KV heads of one together. An item that does not exist follows the last.
    __device__ Item at(int index) const {
        if (index >= num_items * NKV) return {};
        const WorkItem item = items[index / NKV];
        const int end = min(item.begin + split_length(item.context), item.context);
        return {item.row, index % NKV, item.begin, end, item.context, item.slot};
    }
};
