// How decode attention cuts a row's context into splits, each worked on by itself. The cuts lie at
// absolute positions and depend on the row's own context alone; their number is at most MAX_SPLITS.
#pragma once

constexpr int SHORTEST_SPLIT = 128;
constexpr int MAX_SPLITS = 64;

__device__ inline int split_length(int context) {
    int length = SHORTEST_SPLIT;
    while (length * MAX_SPLITS < context) length *= 2;
    return length;
}

__device__ inline int num_splits(int context) {
    const int length = split_length(context);
    return (context + length - 1) / length;
}
