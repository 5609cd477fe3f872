// Selection by radix over a row's ids, by one block of THREADS: a histogram over one digit of all
// keys still in question, then the digit at which the running sum, from the top, reaches what is
// wanted, then the next digit. No sort, and no float is ever added.
#pragma once

#include "sampling.cuh"

constexpr int THREADS = 1024;
constexpr int DIGIT_BITS = 11;
constexpr int BINS = 1 << DIGIT_BITS;

// *at += x in shared memory, where only 32-bit additions are native: 64 bits in a loop of
// compare-and-swap took 11 ms a row when all ids fell into one bin.
__device__ inline void add_shared(u64* at, u64 x) {
    u32* words = reinterpret_cast<u32*>(at);
    const u32 low = static_cast<u32>(x);
    const u32 carry = atomicAdd(&words[0], low) + low < low;
    const u32 high = static_cast<u32>(x >> 32) + carry;
    if (high) atomicAdd(&words[1], high);
}

// The largest digit at which the bins, added from the top, reach `wanted`, which is then reduced by
// what lies above that digit. The bins' sum is at least `wanted`, and that at least 1.
__device__ inline int select_digit(u64* bins, u64* scratch, u64& wanted) {
    __shared__ int chosen;
    __shared__ u64 rest;
    __syncthreads();
    constexpr int EACH = BINS / THREADS;
    const int top = BINS - 1 - static_cast<int>(threadIdx.x) * EACH;  // this thread's highest bin
    u64 own = 0;
#pragma unroll
    for (int i = 0; i < EACH; ++i) own += bins[top - i];
    u64 before = own;  // becomes the sum over all higher bins
    for (int step = 1; step < WARP; step *= 2) {
        const u64 other = __shfl_up_sync(ALL_LANES, before, step);
        if (static_cast<int>(threadIdx.x) % WARP >= step) before += other;
    }
    if (threadIdx.x % WARP == WARP - 1) scratch[threadIdx.x / WARP] = before;
    __syncthreads();
    before -= own;
#pragma unroll 1
    for (int w = 0; w < static_cast<int>(threadIdx.x) / WARP; ++w) before += scratch[w];
    if (before < wanted && wanted <= before + own) {
        u64 above = before;
        int bin = top;
        while (above + bins[bin] < wanted) above += bins[bin--];
        chosen = bin;
        rest = wanted - above;
    }
    __syncthreads();
    wanted = rest;
    return chosen;
}

__device__ inline void clear_bins(u64* bins) {
    __syncthreads();
    for (int i = threadIdx.x; i < BINS; i += THREADS) bins[i] = 0;
    __syncthreads();
}

// The largest key (of BITS bits) such that amount(i, key), added over the ids with that or a larger
// key, reaches `wanted`. One pass over the row for each digit.
template <int BITS, typename Key, typename Amount>
__device__ inline u64 select_from_top(int limit, u64 wanted, u64* bins, u64* scratch,
                                      const Key& key, const Amount& amount) {
    u64 prefix = 0;
#pragma unroll 1
    for (int shift = (BITS - 1) / DIGIT_BITS * DIGIT_BITS; shift >= 0; shift -= DIGIT_BITS) {
        clear_bins(bins);
#pragma unroll 1
        for (int i = threadIdx.x; i < limit; i += THREADS) {
            const u64 value = key(i);
            if (value >> (shift + DIGIT_BITS) == prefix) {
                const u64 added = amount(i, value);
                if (added) add_shared(&bins[value >> shift & (BINS - 1)], added);
            }
        }
        prefix = prefix << DIGIT_BITS | static_cast<u64>(select_digit(bins, scratch, wanted));
    }
    return prefix;
}

// A mass above 0 by its exponent and its next 5 bits: larger masses have no smaller digit, and masses
// of many orders of magnitude fall into many bins.
__device__ inline int mass_digit(u64 mass) {
    const int exponent = 63 - __clzll(static_cast<long long>(mass));
    const u64 below_leading_one = mass << (63 - exponent) << 1;
    return exponent * 32 + static_cast<int>(below_leading_one >> 59);
}

// The smallest mass that is needed when the masses mass(id) of a row are added, largest first, until
// they reach `wanted`, which is at least 1 and at most their sum. Two passes over the row, and more
// where over THREADS ids share the digit.
template <int MASS_BITS, typename Mass>
__device__ inline u64 least_mass_of_share(int limit, u64 wanted, u64* bins, u64* scratch,
                                          const Mass& mass) {
    __shared__ int num_found;
    clear_bins(bins);
#pragma unroll 1
    for (int i = threadIdx.x; i < limit; i += THREADS) {
        const u64 own = mass(i);
        if (own) add_shared(&bins[mass_digit(own)], own);
    }
    const int digit = select_digit(bins, scratch, wanted);
    if (threadIdx.x == 0) num_found = 0;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < limit; i += THREADS) {
        const u64 own = mass(i);
        if (own == 0 || mass_digit(own) != digit) continue;
        const int at = atomicAdd(&num_found, 1);
        if (at < THREADS) bins[at] = own;
    }
    __syncthreads();
    const int count = num_found;
    if (count > THREADS) {
        return select_from_top<MASS_BITS>(limit, wanted, bins, scratch, mass, [&](int, u64 own) {
            return own && mass_digit(own) == digit ? own : 0ull;
        });
    }
    const u64 own = static_cast<int>(threadIdx.x) < count ? bins[threadIdx.x] : 0;
    u64 larger = 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i) larger += bins[i] > own ? bins[i] : 0;
    return ~block_largest(own && larger < wanted ? ~own : 0ull, scratch);
}
