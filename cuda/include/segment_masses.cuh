// Sums of masses by segment, which sample_masses_kernel leaves, and one id drawn from them: the
// segment in which the target lies, then the id in it. For top-p alone a histogram of the masses
// says at which digit the nucleus ends; groups whose likeliest id is below it are not read again.
#pragma once

#include "candidates.cuh"

constexpr int MASS_BITS = 41;  // a mass is at most 2^40

// A digit: a mass above 0 by its exponent and its next 5 bits, so that masses of many orders of
// magnitude fall into many bins. The rest: the other bits, mass = 1.(5 bits)(rest) * 2^exponent.
constexpr int REST_BITS = 18;
constexpr int FIRST_DIGIT = 87 << 5;  // of a mass of 1, a weight of 2^-40
constexpr int DIGITS = 41 * 32;

// Of a floored weight; below 0 for 0.
__device__ inline int digit_of(float weight) {
    return static_cast<int>(__float_as_uint(weight) >> REST_BITS) - FIRST_DIGIT;
}
__device__ inline u32 rest_of(float weight) {
    return __float_as_uint(weight) & ((1u << REST_BITS) - 1);
}
__device__ inline u64 mass_of_digit(int digit, u32 rest) {
    return mass_of(__uint_as_float(static_cast<u32>(digit + FIRST_DIGIT) << REST_BITS | rest));
}
// The smallest weight whose mass has at least this digit.
__device__ inline float least_weight_of(int digit) {
    const float begin = __uint_as_float(static_cast<u32>(digit + FIRST_DIGIT) << REST_BITS);
    const float below = floored(begin);  // another one where masses are less than 32
    return below == begin ? begin : below + 1.0f / (1ull << 40);
}
// The sum of `count` masses of a digit whose rests add up to `rests`.
__device__ inline u64 mass_of_bin(int digit, u32 count, u32 rests) {
    const u64 sum = (static_cast<u64>(count) * (32 + digit % 32) << REST_BITS) + rests;
    const int shift = digit / 32 - 23;
    return shift >= 0 ? sum << shift : sum >> -shift;
}

// Draws among all ids of a row but those outside of its top_k likeliest ones.
__device__ inline bool is_ranked(int top_k, int limit) { return top_k > 0 && top_k < limit; }

// The sum of mass(logit) over each segment of a row goes to `kept`: a warp a segment.
template <typename Change, typename Mass>
__device__ __forceinline__ void sum_segments(const Row<Change>& row, const Mass& mass, u64* kept) {
    static_assert(THREADS / WARP == SEGMENTS, "a warp a segment");
    const int segment = threadIdx.x / WARP, length = segment_length(row.limit);
    const int end = min((segment + 1) * length, row.limit);
    u64 sum = 0;
#pragma unroll 1
    for (int id = segment * length + threadIdx.x % WARP; id < end; id += WARP) {
        sum += mass(row.value(id));
    }
    for (int step = WARP / 2; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    if (threadIdx.x % WARP == 0) kept[segment] = sum;
}

// The id at which the running sum of mass(logit), in id order, exceeds floor(bits * total / 2^64).
// `kept`: the sums of the segments, in shared memory.
template <typename Change, typename Mass>
__device__ __forceinline__ int draw_by_segments(const Row<Change>& row, const u64* kept,
                                                const Mass& mass, const u64& bits) {
    __shared__ int result;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    __syncthreads();
    u64 total = 0;
#pragma unroll 4
    for (int s = 0; s < SEGMENTS; ++s) total += kept[s];
    const u64 target = __umul64hi(bits, total);
    u64 before = 0;
    int chosen = 0;
    for (; before + kept[chosen] <= target; ++chosen) before += kept[chosen];

    // each thread a few ids in a row
    const int length = segment_length(row.limit);
    const int own_ids = (length + THREADS * EACH - 1) / (THREADS * EACH) * EACH;
    const int end = min((chosen + 1) * length, row.limit);
    const int first = chosen * length + static_cast<int>(threadIdx.x) * own_ids;
    const int last = min(first + own_ids, end);
    const bool aligned = is_aligned(row.raw);
    u64 own = 0;
#pragma unroll 1
    for (int id = first; id < last; id += EACH) {
        float x[EACH];
        load_logits(row.raw, aligned, id, min(EACH, last - id), x);
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            own += mass(row.change(x[i], id + i));
        }
    }
    u64 through = own;
    for (int step = 1; step < WARP; step *= 2) {
        const u64 other = __shfl_up_sync(ALL_LANES, through, step);
        if (lane >= step) through += other;
    }
    if (lane == WARP - 1) row.scratch[warp] = through;
    __syncthreads();
    before += through - own;
#pragma unroll 4
    for (int w = 0; w < warp; ++w) before += row.scratch[w];
    if (before <= target && target < before + own) {
        int at = first;
        u64 next = mass(row.value(at));
#pragma unroll 1
        for (; before + next <= target; next = mass(row.value(++at))) before += next;
        result = at;
    }
    __syncthreads();
    return result;
}

// The nucleus of a row of which `histogram` [DIGITS] holds the masses by digit: least_mass becomes
// the smallest mass in it, and `kept` the segments' sums over its ids not below min_p.
// False where more ids share the last digit than there is room for.
template <typename Change>
__device__ __forceinline__ bool keep_nucleus(const Row<Change>& row,
                                             const u64* __restrict__ histogram, float top_p,
                                             float min_p, u64* kept, u64& least_mass) {
    constexpr u32 RESTS = (1u << REST_BITS) - 1, KEPT = 1u << 31;
    u32* listed = row.listed;  // KEPT unless below min_p, segment, rest
    __shared__ int num_found;
    u64 total = 0;
    for (int d = threadIdx.x; d < BINS; d += THREADS) {
        const u64 sum = d < DIGITS ? histogram[d] : 0;
        row.bins[d] = sum;
        total += sum;
    }
    if (threadIdx.x < SEGMENTS) kept[threadIdx.x] = 0;
    if (threadIdx.x == 0) num_found = 0;
    u64 wanted = share_of(top_p, block_total(total, row.scratch));
    const int digit = select_digit(row.bins, row.scratch, wanted);

    const float least = least_weight_of(digit), end = least_weight_of(digit + 1);
    const float least_above = fmaxf(end, min_p);
    for (int g = threadIdx.x / WARP; g < GROUPS; g += THREADS / WARP) {
        const u64 largest = row.group_keys[g];
        if (largest == 0) continue;
        // one digit to spare, should exp not be quite monotonic
        if (digit_of(floored(row.weights(logit_of(largest)))) < digit - 1) continue;
        const u32 segment = g / SEGMENT_WARPS;
        MassSum above;
        visit_values<1>(row.raw, row.change, g, row.limit, [&](float x, int) {
            const float weight = row.weights(x);
            if (weight >= least_above) above.add(weight);
            if (weight >= least && weight < end) {
                const int at = atomicAdd(&num_found, 1);
                const u32 entry = segment << REST_BITS | rest_of(floored(weight));
                if (at < MAX_LISTED_MASSES) listed[at] = weight >= min_p ? entry | KEPT : entry;
            }
        });
        u64 sum = above.total();
        for (int step = WARP / 2; step > 0; step /= 2) {
            sum += __shfl_xor_sync(ALL_LANES, sum, step);
        }
        if (threadIdx.x % WARP == 0 && sum) add_shared(&kept[segment], sum);
    }
    __syncthreads();
    const int count = num_found;
    if (count > MAX_LISTED_MASSES) return false;
    const u32 least_rest = static_cast<u32>(select_from_top<REST_BITS>(
        count, wanted, row.bins, row.scratch, [&](int i) { return u64(listed[i] & RESTS); },
        [&](int, u64 rest) { return mass_of_digit(digit, static_cast<u32>(rest)); }));
    for (int i = threadIdx.x; i < count; i += THREADS) {
        const u32 entry = listed[i];
        if ((entry & KEPT) == 0 || (entry & RESTS) < least_rest) continue;
        const u32 segment = entry >> REST_BITS & (SEGMENTS - 1);
        add_shared(&kept[segment], mass_of_digit(digit, entry & RESTS));
    }
    least_mass = mass_of_digit(digit, least_rest);
    return true;
}

// One id by inverse CDF over the masses that top-k, top-p and min-p leave. `segment_masses`: the
// row's, for a draw without top-k and top-p; `histogram`: the row's, for one with top-p alone.
template <typename Change>
__device__ __forceinline__ int draw(const Row<Change>& row, int top_k, float top_p, float min_p,
                                    const u64& bits, const u64* segment_masses,
                                    const u64* histogram) {
    __shared__ u64 kept[SEGMENTS];
    const bool ranked = is_ranked(top_k, row.limit);
    int id;
    if (ranked && draw_ranked(row, top_k, top_p, min_p, bits, id)) return id;
    u32 least_logit = 0;
    u64 least_mass = 0;
    bool summed = !ranked;
    if (summed && top_p < 1.0f) {
        summed = keep_nucleus(row, histogram, top_p, min_p, kept, least_mass);
    } else if (summed && threadIdx.x < SEGMENTS) {
        kept[threadIdx.x] = segment_masses[threadIdx.x];
    }
    if (ranked) {
        least_logit = static_cast<u32>(select_from_top<32>(
            row.limit, top_k, row.bins, row.scratch,
            [&](int i) { return u64(ordered(row.value(i))); }, [](int, u64) { return 1ull; }));
    }
    const auto weight = [&](float x) {
        return ordered(x) >= least_logit ? row.weights(x) : 0.0f;
    };
    const auto kept_mass = [&](float x) {
        const float w = weight(x);
        const u64 mass = mass_of(w);
        return mass >= least_mass && w >= min_p ? mass : 0;
    };
    if (!summed) {
        if (top_p < 1.0f) {
            u64 total = 0;
#pragma unroll 1
            for (int i = threadIdx.x; i < row.limit; i += THREADS) {
                total += mass_of(weight(row.value(i)));
            }
            total = block_total(total, row.scratch);
            least_mass = least_mass_of_share<MASS_BITS>(
                row.limit, share_of(top_p, total), row.bins, row.scratch,
                [&](int i) { return mass_of(weight(row.value(i))); });
        }
        sum_segments(row, kept_mass, kept);
    }
    return draw_by_segments(row, kept, kept_mass, bits);
}
