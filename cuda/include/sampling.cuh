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

// What of a weight in [0, 1] its mass holds: the weight as a whole number of 2^-40.
__device__ inline float floored(float weight) {
    constexpr float LEAST_EXACT = 1.0f / 131072.0f;  // 2^-17: from here on all bits are
    return weight < LEAST_EXACT ? __fsub_rn(__fadd_rz(weight, LEAST_EXACT), LEAST_EXACT) : weight;
}

// A thread's sum of masses, at most 512 of them, in two 32-bit integers: 6 instructions an id,
// where mass_of and a 64-bit addition are twice as many. To add 64 to a weight, rounding down,
// leaves the bits from 2^-17 on in a float's last places; to add 2^-17 to the rest those from 2^-40.
struct MassSum {
    u32 high = 0, low = 0;

    __device__ void add(float weight) {
        constexpr float HIGH = 64.0f, LOW = 1.0f / 131072.0f;
        const float upper = __fadd_rz(weight, HIGH);
        const float rest = __fsub_rn(weight, __fsub_rn(upper, HIGH));
        high += __float_as_uint(upper) - __builtin_bit_cast(u32, HIGH);
        low += __float_as_uint(__fadd_rz(rest, LOW)) - __builtin_bit_cast(u32, LOW);
    }
    __device__ u64 total() const { return (static_cast<u64>(high) << 23) + low; }
};

// exp((x - largest) / temperature). The quotient by a reciprocal and one correction has the bits of
// a division. Below -64, where a mass is 0 anyway, it stays -64, for no infinity may come in.
struct Weights {
    float largest, temperature, inverse;

    __device__ float operator()(float x) const {
        const float below = fmaxf(__fsub_rn(x, largest), -64.0f * temperature);
        const float near = __fmul_rn(below, inverse);
        return expf(fmaf(fmaf(-near, temperature, below), inverse, near));
    }
};
__device__ inline Weights weights_of(float largest, float temperature) {
    const float used = fmaxf(temperature, 1e-30f);  // as the reference
    return {largest, used, __fdiv_rn(1.0f, used)};
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
