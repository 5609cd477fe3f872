// The likeliest ids of a row, found without reading all of the row again, and one drawn from them.
//
// sample_segments_kernel leaves the largest key of each of GROUPS groups of a row's ids. The n-th
// largest of those is at most the n-th largest key of the row. Ids whose logit is not below its
// logit are the candidates: the n likeliest, those equal to them, and seldom many more; they lie in
// groups whose largest key is not below it either, mostly n of them.
//
// What is drawn is what `draw` in sampling.cu would draw from all ids, to the bit; where that cannot
// be told from the candidates alone, draw_candidates says so. One candidate a thread.
#pragma once

#include "radix_select.cuh"

constexpr int SEGMENTS = 32;  // blocks of sample_segments_kernel a row
constexpr int SEGMENT_THREADS = 256;
constexpr int SEGMENT_WARPS = SEGMENT_THREADS / WARP;
constexpr int GROUPS = SEGMENTS * SEGMENT_WARPS;  // a warp's share of a segment
constexpr int EACH = 4;                           // consecutive ids of a thread
constexpr int MAX_WANTED = GROUPS / 2;
constexpr int MAX_CANDIDATES = THREADS;

// Calls visit(id, count) for the ids of a group: EACH a lane, every SEGMENT_THREADS * EACH.
template <int UNROLL, typename Visit>
__device__ __forceinline__ void visit_group(int group, int limit, const Visit& visit) {
    const int length = ((limit + SEGMENTS - 1) / SEGMENTS + EACH - 1) / EACH * EACH;
    const int begin = group / SEGMENT_WARPS * length, end = min(begin + length, limit);
    int id = begin + (group % SEGMENT_WARPS * WARP + threadIdx.x % WARP) * EACH;
#pragma unroll UNROLL
    for (; id + EACH <= end; id += SEGMENT_THREADS * EACH) visit(id, EACH);
    if (id < end) visit(id, end - id);
}

__device__ inline bool is_aligned(const float* row) {
    return reinterpret_cast<unsigned long long>(row) % 16 == 0;
}

// The logits of `count` consecutive ids from `id` on, a multiple of EACH; one load in aligned rows.
__device__ __forceinline__ void load_logits(const float* row, bool aligned, int id, int count,
                                            float (&to)[EACH]) {
    static_assert(EACH == 4, "one float4");
    if (aligned && count == EACH) {
        const float4 four = *reinterpret_cast<const float4*>(row + id);
        to[0] = four.x, to[1] = four.y, to[2] = four.z, to[3] = four.w;
    } else {
#pragma unroll
        for (int i = 0; i < EACH; ++i) to[i] = i < count ? row[id + i] : 0.0f;
    }
}

// A row that is selected from: change(x, id) is the logit of an id whose raw logit is x, `largest`
// the largest of them. bins, scratch: shared memory of BINS and THREADS / WARP.
template <typename Change>
struct Row {
    const float* raw;
    const Change& change;
    int limit;
    float largest;
    const u64* group_keys;
    u64* bins;
    u64* scratch;

    __device__ float value(int id) const { return change(raw[id], id); }
};

// The sum of amount(logit) over all ids of a row, the same in every thread.
template <typename Change, typename Amount>
__device__ __forceinline__ u64 row_total(const Row<Change>& row, const Amount& amount) {
    const bool aligned = is_aligned(row.raw);
    u64 total = 0;
    for (int id = threadIdx.x * EACH; id < row.limit; id += THREADS * EACH) {
        const int count = min(EACH, row.limit - id);
        float x[EACH];
        load_logits(row.raw, aligned, id, count, x);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            if (i < count) total += amount(row.change(x[i], id + i));
        }
    }
    return block_total(total, row.scratch);
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
    if (threadIdx.x < GROUPS) {
        const u64 own = row.group_keys[threadIdx.x];
        int above = 0;
        for (int g = 0; g < GROUPS; ++g) above += row.group_keys[g] > own;
        if (above == wanted - 1) least_key = own;
    }
    __syncthreads();
    least = least_key;
    for (int g = threadIdx.x / WARP; g < GROUPS; g += THREADS / WARP) {
        const u64 largest = row.group_keys[g];
        if (largest == 0 || largest >> 32 < least >> 32) continue;
        visit_group<1>(g, row.limit, [&](int id, int count) {
#pragma unroll 1
            for (int i = 0; i < count; ++i) {
                const float changed = row.value(id + i);
                if (changed == -INF || ordered(changed) < least >> 32) continue;
                const int at = atomicAdd(&num_found, 1);
                if (at < MAX_CANDIDATES) row.bins[at] = id_key(changed, id + i);
            }
        });
    }
    __syncthreads();
    return num_found;
}

// Sets `id` to what is drawn; false where it takes more than the candidates to know.
template <typename Change>
__device__ __forceinline__ bool draw_candidates(const Row<Change>& row, float temperature,
                                                int top_k, float top_p, float min_p, u64 bits,
                                                int& id) {
    __shared__ int result;
    const bool by_rank = top_k > 0 && top_k < row.limit;
    if (by_rank ? top_k > MAX_WANTED : top_p >= 1.0f && min_p <= 0.0f) return false;
    u64 least;
    const int count = collect(row, by_rank ? top_k : MAX_WANTED, least);
    if (count > MAX_CANDIDATES) return false;
    const float weight_below =
        least == 0 ? 0.0f : expf((logit_of(least) - row.largest) / temperature);
    const u64 mass_below = mass_of(weight_below);  // no id but the candidates has more

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
    const bool ranked = mine && (!by_rank || above < top_k);
    const float weight = ranked ? expf((logit_of(key) - row.largest) / temperature) : 0.0f;
    u64 mass = mass_of(weight);
    if (top_p < 1.0f) {
        const u64 total = by_rank ? block_total(mass, row.scratch) : row_total(row, [&](float x) {
            return mass_of(expf((x - row.largest) / temperature));
        });
        const u64 needed = share_of(top_p, total);
        if (mine) masses[place] = mass;
        __syncthreads();
        u64 larger = 0;
        for (int i = 0; i < count; ++i) larger += masses[i] > mass ? masses[i] : 0;
        if (larger >= needed) mass = 0;
        if (!by_rank) {
            const u64 smallest = ~block_largest(mass ? ~mass : 0ull, row.scratch);
            if (smallest <= mass_below) return false;
        }
    } else if (!by_rank && weight_below >= min_p) {
        return false;
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
