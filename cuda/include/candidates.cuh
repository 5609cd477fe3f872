// The likeliest ids of a row, found without reading all of the row again, and one drawn from them.
//
// sample_segments_kernel leaves the largest key of each of GROUPS groups of a row's ids. The n-th
// largest of those is at most the n-th largest key of the row. Ids whose logit is not below its
// logit are the candidates: the n likeliest, those equal to them, and seldom many more; they lie in
// groups whose largest key is not below it either, mostly n of them. One candidate a thread.
#pragma once

#include "logit_adjustments.cuh"
#include "radix_select.cuh"

constexpr int SEGMENTS = 32;  // blocks of sample_segments_kernel a row
constexpr int SEGMENT_THREADS = 256;
constexpr int SEGMENT_WARPS = SEGMENT_THREADS / WARP;
constexpr int GROUPS = SEGMENTS * SEGMENT_WARPS;  // a warp's share of a segment
constexpr int EACH = 4;                           // consecutive ids of a thread
constexpr int MAX_WANTED = GROUPS / 2;
constexpr int MAX_CANDIDATES = THREADS;
constexpr int MAX_LISTED_MASSES = 4096;

// Ids of a segment; the last ones may have fewer.
__device__ inline int segment_length(int limit) {
    return ((limit + SEGMENTS - 1) / SEGMENTS + EACH - 1) / EACH * EACH;
}

// Calls visit(id, count) for the ids of a group: EACH a lane, every SEGMENT_THREADS * EACH.
template <int UNROLL, typename Visit>
__device__ __forceinline__ void visit_group(int group, int limit, const Visit& visit) {
    const int length = segment_length(limit);
    const int begin = group / SEGMENT_WARPS * length, end = min(begin + length, limit);
    int id = begin + (group % SEGMENT_WARPS * WARP + threadIdx.x % WARP) * EACH;
#pragma unroll UNROLL
    for (; id + EACH <= end; id += SEGMENT_THREADS * EACH) visit(id, EACH);
    if (id < end) visit(id, end - id);
}

__device__ inline bool is_aligned(const float* row) {
    return reinterpret_cast<unsigned long long>(row) % 16 == 0;
}

// The logits of `count` consecutive ids from `id` on, a multiple of EACH, and -inf after them; one
// load in aligned rows.
__device__ __forceinline__ void load_logits(const float* row, bool aligned, int id, int count,
                                            float (&to)[EACH]) {
    static_assert(EACH == 4, "one float4");
    if (aligned && count == EACH) {
        const float4 four = *reinterpret_cast<const float4*>(row + id);
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    } else {
#pragma unroll
        for (int i = 0; i < EACH; ++i) to[i] = i < count ? row[id + i] : -INF;
    }
}

__device__ inline void prefetch(const float* at) {
#ifdef __CUDA_ARCH__
    asm volatile("prefetch.L2 [%0];" ::"l"(at));
#endif
}

// A row that is selected from: change(x, id) is the logit of an id whose raw logit is x, and
// group_keys are of those. Shared memory: bins [BINS], scratch [THREADS / WARP], listed
// [MAX_LISTED_MASSES].
template <typename Change>
struct Row {
    const float* raw;
    const Change& change;
    int limit;
    Weights weights;
    const u64* group_keys;
    u64* bins;
    u64* scratch;
    u32* listed;

    __device__ float value(int id) const { return change(raw[id], id); }
};

// Calls visit(changed logit, id) for the ids of a group, and with a logit of -inf for some that are
// none, which spares a branch an id. LOADS loads are under way at a time; where that is one, the
// first AHEAD of a lane have been sent for to the L2: all of a vocabulary of 2^18.
template <int LOADS, typename Change, typename Visit>
__device__ __forceinline__ void visit_values(const float* raw, const Change& change, int group,
                                             int limit, const Visit& visit) {
    constexpr int STRIDE = SEGMENT_THREADS * EACH, AHEAD = 8;
    const bool aligned = is_aligned(raw);
    const int end = min((group / SEGMENT_WARPS + 1) * segment_length(limit), limit);
    int first = group / SEGMENT_WARPS * segment_length(limit);
    first += (group % SEGMENT_WARPS * WARP + threadIdx.x % WARP) * EACH;
    if (LOADS == 1) {
#pragma unroll
        for (int n = 1; n < AHEAD; ++n) {
            if (first + n * STRIDE < end) prefetch(raw + first + n * STRIDE);
        }
    }
#pragma unroll 1
    for (; first < end; first += LOADS * STRIDE) {
        float x[LOADS][EACH];
#pragma unroll
        for (int n = 0; n < LOADS; ++n) {
            const int id = first + n * STRIDE;
            load_logits(raw, aligned, id, min(EACH, end - id), x[n]);
        }
#pragma unroll
        for (int n = 0; n < LOADS; ++n) {
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const int id = first + n * STRIDE + i;
                visit(change(x[n][i], id), id);
            }
        }
    }
}

// The keys of the candidates for the `wanted` likeliest ids, in any order, go to row.bins. Returns
// how many there are; more than MAX_CANDIDATES are not written. `least` becomes the key of which no
// candidate's logit is below that of, or 0 where all ids that may be sampled are candidates.
template <typename Change>
__device__ inline int collect(const Row<Change>& row, int wanted, u64& least) {
    __shared__ u64 least_key;
    __shared__ int num_found;
    __syncthreads();
    if (threadIdx.x == 0) least_key = num_found = 0;
    __syncthreads();
    constexpr int SHARERS = THREADS / GROUPS;  // of the comparisons of one group's key
    const u64 own = row.group_keys[threadIdx.x / SHARERS];
    int larger = 0;
#pragma unroll 4
    for (int g = threadIdx.x % SHARERS; g < GROUPS; g += SHARERS) larger += row.group_keys[g] > own;
    for (int step = 1; step < SHARERS; step *= 2) {
        larger += __shfl_xor_sync(ALL_LANES, larger, step);
    }
    if (larger == wanted - 1) least_key = own;
    __syncthreads();
    least = least_key;
    for (int g = threadIdx.x / WARP; g < GROUPS; g += THREADS / WARP) {
        const u64 largest = row.group_keys[g];
        if (largest == 0 || largest >> 32 < least >> 32) continue;
        visit_values<1>(row.raw, row.change, g, row.limit, [&](float changed, int id) {
            if (changed == -INF || ordered(changed) < least >> 32) return;
            const int at = atomicAdd(&num_found, 1);
            if (at < MAX_CANDIDATES) row.bins[at] = id_key(changed, id);
        });
    }
    __syncthreads();
    return num_found;
}

// Sets `id` to what is drawn from the top_k likeliest ids; false where it takes more than the
// candidates to know.
template <typename Change>
__device__ __forceinline__ bool draw_ranked(const Row<Change>& row, int top_k, float top_p,
                                            float min_p, const u64& bits, int& id) {
    __shared__ int result;
    if (top_k > MAX_WANTED) return false;
    u64 least;
    const int count = collect(row, top_k, least);
    if (count > MAX_CANDIDATES) return false;

    const bool mine = static_cast<int>(threadIdx.x) < count;
    const u64 key = mine ? row.bins[threadIdx.x] : 0;
    u64* masses = row.bins + MAX_CANDIDATES;  // by id
    int place = 0, above = 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        const u64 other = row.bins[i];
        place += id_of(other) < id_of(key);
        above += other >> 32 > key >> 32;
    }
    const float weight = mine && above < top_k ? row.weights(logit_of(key)) : 0.0f;
    u64 mass = mass_of(weight);
    if (top_p < 1.0f) {
        const u64 needed = share_of(top_p, block_total(mass, row.scratch));
        if (mine) masses[place] = mass;
        __syncthreads();
        u64 larger = 0;
#pragma unroll 1
        for (int i = 0; i < count; ++i) larger += masses[i] > mass ? masses[i] : 0;
        if (larger >= needed) mass = 0;
    }
    if (weight < min_p) mass = 0;
    __syncthreads();
    if (mine) masses[place] = mass;
    __syncthreads();
    u64 before = 0, total = 0;
#pragma unroll 1
    for (int i = 0; i < count; ++i) {
        before += i < place ? masses[i] : 0;
        total += masses[i];
    }
    const u64 target = __umul64hi(bits, total);
    if (mine && before <= target && target < before + mass) result = id_of(key);
    __syncthreads();
    id = result;
    return true;
}

// The `count` largest keys of a row, largest first, go to `keys`; false where there are more
// candidates than there is room for.
template <typename Change>
__device__ __forceinline__ bool largest_candidates(const Row<Change>& row, int count, u64* keys) {
    u64 least;
    const int num_found = collect(row, count, least);
    if (num_found > MAX_CANDIDATES) return false;
    if (static_cast<int>(threadIdx.x) < num_found) {
        const u64 own = row.bins[threadIdx.x];
        int above = 0;
        for (int i = 0; i < num_found; ++i) above += row.bins[i] > own;
        if (above < count) keys[above] = own;
    }
    __syncthreads();
    return true;
}
