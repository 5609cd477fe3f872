// What the logits of a row change by before an id is chosen, id by id and on the fly: a row is
// never written. The order and roundings are those of engine/ops/numpy/logit_adjustments.py.
#pragma once

#include "sampling.cuh"

constexpr int PENALTIES = 1, LISTED_IDS = 2, ALLOWED_IDS = 4, STOPS_FORBIDDEN = 8;
constexpr int LISTED_BITS = 8192;  // of a set of id % LISTED_BITS, which says most ids are not listed
constexpr float LARGEST = __builtin_bit_cast(float, 0x7f7fffff);

__device__ inline bool has_bit(const u32* words, int id) { return words[id >> 5] >> (id & 31) & 1; }

// By slot, as LogitAdjustments in engine/forward_batch.py says; `masks` by mask row.
struct AdjustmentArrays {
    const float *presence, *frequency, *repetition;
    const u32 *output_counts, *prompt_ids, *allowed_ids;
    const int* listed_ids;
    const float* listed_biases;
    const int* num_listed;
    int max_listed;
    const u32* masks;
};

// A row that nothing changes.
struct Unchanged {
    static constexpr int LOADS = 4;  // see visit_values
    __device__ float operator()(float x, int) const { return x; }
};

// One row's. Pointers are null where the row has no such feature.
struct Adjustments {
    static constexpr int LOADS = 1;
    const u32 *counts, *prompt, *allowed, *mask, *listed_bits;
    const int* listed;
    const float* biases;
    int num_listed;
    bool biased, stops_forbidden;
    float presence, frequency, repetition;

    // The changed logit of an id, -inf for one that may not be sampled, and where x is.
    __device__ float operator()(float x, int id) const {
        if (x == -INF) return x;
        if (allowed && !has_bit(allowed, id)) return -INF;
        if (mask && !has_bit(mask, id)) return -INF;
        if (counts) {
            const u32 count = counts[id >> 1] >> (id & 1) * 16 & 0xffffu;
            if (count || has_bit(prompt, id)) {
                x = x > 0.0f ? __fdiv_rn(x, repetition) : __fmul_rn(x, repetition);
            }
            if (count) {
                x = __fsub_rn(x, __fmul_rn(frequency, static_cast<float>(count)));
                x = __fsub_rn(x, presence);
            }
            x = finite(x);
        }
        return has_bit(listed_bits, id % LISTED_BITS) ? with_bias(x, id) : x;
    }

private:
    __device__ static float finite(float x) { return fminf(fmaxf(x, -LARGEST), LARGEST); }

    __device__ float with_bias(float x, int id) const {
        int low = 0, high = num_listed;
        while (low < high) {
            const int middle = (low + high) / 2;
            if (listed[middle] / 2 < id) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        if (low == num_listed || listed[low] / 2 != id) return x;
        if (stops_forbidden && listed[low] % 2) return -INF;
        if (!biased) return x;
        return biases[low] == -INF ? -INF : finite(__fadd_rn(x, biases[low]));
    }
};

// `listed_bits`: LISTED_BITS of shared memory, which the whole block fills here.
__device__ inline Adjustments adjustments_of(const AdjustmentArrays& from, int features, int slot,
                                             int mask_row, int vocab, u32* listed_bits) {
    const long long words = (vocab + 31) / 32;
    const long long first = static_cast<long long>(slot) * from.max_listed;
    Adjustments own = {};
    own.listed_bits = listed_bits;
    own.biased = features & LISTED_IDS;
    own.stops_forbidden = features & STOPS_FORBIDDEN;
    if (features & PENALTIES) {
        own.counts = from.output_counts + slot * ((vocab + 1ll) / 2);
        own.prompt = from.prompt_ids + slot * words;
        own.presence = from.presence[slot];
        own.frequency = from.frequency[slot];
        own.repetition = from.repetition[slot];
    }
    if (features & ALLOWED_IDS) own.allowed = from.allowed_ids + slot * words;
    if (mask_row >= 0) own.mask = from.masks + mask_row * words;
    if (own.biased || own.stops_forbidden) {
        own.num_listed = from.num_listed[slot];
        own.listed = from.listed_ids + first;
        own.biases = from.listed_biases + first;
    }
    for (int i = threadIdx.x; i < LISTED_BITS / 32; i += blockDim.x) listed_bits[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < own.num_listed; i += blockDim.x) {
        const int place = own.listed[i] / 2 % LISTED_BITS;
        atomicOr(&listed_bits[place / 32], 1u << place % 32);
    }
    __syncthreads();
    return own;
}

// One more of the id in the row's output, unless its 16 bits are full.
__device__ inline void count_id(u32* output_counts, int slot, int vocab, int id) {
    u32& word = output_counts[slot * ((vocab + 1ll) / 2) + (id >> 1)];
    const int shift = (id & 1) * 16;
    if ((word >> shift & 0xffffu) != 0xffffu) word += 1u << shift;
}
