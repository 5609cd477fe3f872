// What sampling is made of: keys, masses, random bits. The formulas, and why masses are integers,
// are stated in engine/ops/numpy/sampling.py; only expf may round differently here.
#pragma once

#include "common.cuh"

using u32 = unsigned;
using u64 = unsigned long long;

constexpr u64 NOT_FINITE = ~0ull;  // above the key of every number

// Larger numbers have larger keys; -0 and +0 have the same.
__device__ inline u32 ordered(float x) {
    const u32 bits = __float_as_uint(x + 0.0f);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Of two ids with equal logits the smaller one has the larger key.
__device__ inline u64 id_key(float x, int id) {
    return static_cast<u64>(ordered(x)) << 32 | (0xffffffffu - static_cast<u32>(id));
}
__device__ inline float logit_of(u64 key) {
    const u32 order = static_cast<u32>(key >> 32);
    return __uint_as_float(order & 0x80000000u ? order ^ 0x80000000u : ~order);
}
__device__ inline int id_of(u64 key) {
    return static_cast<int>(0xffffffffu - static_cast<u32>(key));
}

// floor(weight * 2^40) for 0 <= weight <= 1, from the bits of the number.
__device__ inline u64 mass_of(float weight) {
    const u32 bits = __float_as_uint(weight);
    const int shift = static_cast<int>(bits >> 23) - 127 - 23 + 40;
    const u64 mantissa = (bits & 0x7fffffu) | 0x800000u;
    if (shift >= 0) return mantissa << shift;
    return shift > -24 ? mantissa >> -shift : 0;
}

// floor(top_p * total), at least 1, for 0 < top_p < 1.
__device__ inline u64 share_of(float top_p, u64 total) {
    const u64 share = static_cast<u64>(static_cast<double>(top_p) * 9223372036854775808.0);
    const u64 needed = __umul64hi(2 * total, share);
    return needed ? needed : 1;
}

// The first 64 bits of Philox-4x32-10 with key `seed` and counter `position`.
__device__ inline u64 random_bits(u64 seed, u64 position) {
    u32 key0 = static_cast<u32>(seed), key1 = static_cast<u32>(seed >> 32);
    u32 c0 = static_cast<u32>(position), c1 = static_cast<u32>(position >> 32), c2 = 0, c3 = 0;
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const u64 p0 = static_cast<u64>(c0) * 0xD2511F53u, p1 = static_cast<u64>(c2) * 0xCD9E8D57u;
        c0 = static_cast<u32>(p1 >> 32) ^ c1 ^ key0;
        c1 = static_cast<u32>(p1);
        c2 = static_cast<u32>(p0 >> 32) ^ c3 ^ key1;
        c3 = static_cast<u32>(p0);
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return static_cast<u64>(c1) << 32 | c0;
}

template <typename T>
__device__ inline T block_total(T x, T* scratch) {
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    __syncthreads();
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
    __syncthreads();
    T total = 0;
#pragma unroll 1
    for (int w = 0; w < static_cast<int>(blockDim.x) / WARP; ++w) total += scratch[w];
    return total;
}

template <typename T>
__device__ inline T warp_largest(T x) {
    for (int step = WARP / 2; step > 0; step /= 2) {
        const T other = __shfl_xor_sync(ALL_LANES, x, step);
        x = other > x ? other : x;
    }
    return x;
}

template <typename T>
__device__ inline T block_largest(T x, T* scratch) {
    x = warp_largest(x);
    __syncthreads();
    if (threadIdx.x % WARP == 0) scratch[threadIdx.x / WARP] = x;
    __syncthreads();
    T largest = scratch[0];
#pragma unroll 1
    for (int w = 1; w < static_cast<int>(blockDim.x) / WARP; ++w) {
        largest = scratch[w] > largest ? scratch[w] : largest;
    }
    return largest;
}
