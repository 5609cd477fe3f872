// sample: one id a row of fp32 logits. Formulas: engine/ops/numpy/sampling.py and
// logit_adjustments.py, followed to the bit but for expf.
//
// sample_segments_kernel, grid (SEGMENTS, B): the largest key of each group of ids of each row,
// NOT_FINITE, or 0 where no id may be sampled; of rows with adjustments and log-probabilities those
// of raw logits too.
// sample_masses_kernel, grid (SEGMENTS, min(B, 32)): what needs the row's largest logit first. Each
// segment's sum of masses, or for top-p alone the row's histogram of masses, and for
// log-probabilities the sums of the raw logits' masses. Blocks leave at once where no row asks.
// sample_kernel, grid (B), 1024 threads: the row's id. Greedy rows end after joining their groups.
// Others draw from the likeliest ids (candidates.cuh) or by segments (segment_masses.cuh), or where
// those are not enough select by radix among all (radix_select.cuh).
//
// logits [*, vocab]; row i of the batch is logits[rows[i]], of state_slots[i], at positions[i]; a
// row below 0 is padding. Parameters by slot. Scratch: group_keys and raw_keys [B, GROUPS],
// segment_masses and raw_masses [B, SEGMENTS], histograms [B, DIGITS]. Rows without features
// (null: none has any) and without a mask (the same) read nothing but their logits.
// sample_kernel has 64 registers a thread, so loops whose speed does not matter are not unrolled,
// one load is under way at a time, and what is needed again after a draw lies in shared memory.
// Check: tools/gpu_check.py --only sample. Time: tools/bench_ops.py
#include "segment_masses.cuh"

constexpr int MAX_TOP = 20;
constexpr int NOT_FINITE_ID = -1, NOTHING_ALLOWED_ID = -2;

extern "C" __global__ void __launch_bounds__(256) sample_segments_kernel(
    const float* __restrict__ logits, const int* __restrict__ rows,
    const int* __restrict__ state_slots, const int* __restrict__ features,
    const int* __restrict__ mask_rows, const u32* __restrict__ masks,
    const float* __restrict__ presence, const float* __restrict__ frequency,
    const float* __restrict__ repetition, const u32* output_counts,
    const u32* __restrict__ prompt_ids, const u32* __restrict__ allowed_ids,
    const int* __restrict__ listed_ids, const float* __restrict__ listed_biases,
    const int* __restrict__ num_listed, int max_listed, const int* __restrict__ num_logprobs,
    u64* __restrict__ group_keys, u64* __restrict__ raw_keys, u64* __restrict__ histograms,
    int vocab, int limit) {
    wait_for_earlier_kernels();
    __shared__ u32 listed_bits[LISTED_BITS / 32];
    const int b = blockIdx.y;
    if (rows[b] < 0) return;
    const float* row = logits + static_cast<long long>(rows[b]) * vocab;
    const int group = blockIdx.x * SEGMENT_WARPS + threadIdx.x / WARP;
    const int own_features = features ? features[b] : 0, mask_row = mask_rows ? mask_rows[b] : -1;
    const bool aligned = is_aligned(row);
    constexpr int CLEARED = DIGITS / SEGMENTS;  // of the histogram, by a block
    if (threadIdx.x < CLEARED) {
        histograms[b * DIGITS + blockIdx.x * CLEARED + threadIdx.x] = 0;
    }
    u64 best = 0;
    if (own_features == 0 && mask_row < 0) {
        visit_group<4>(group, limit, [&](int id, int count) {
            float x[EACH];
            load_logits(row, aligned, id, count, x);
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const u64 key = isfinite(x[i]) ? id_key(x[i], id + i) : NOT_FINITE;
                if (i < count) best = key > best ? key : best;
            }
        });
    } else {
        const AdjustmentArrays arrays = {presence,   frequency,  repetition,    output_counts,
                                         prompt_ids, allowed_ids, listed_ids,   listed_biases,
                                         num_listed, max_listed, masks};
        const Adjustments adjust = adjustments_of(arrays, own_features, state_slots[b], mask_row,
                                                  vocab, listed_bits);
        const bool logprobs = num_logprobs[state_slots[b]] >= 0;
        u64 raw_best = 0;
        visit_group<1>(group, limit, [&](int id, int count) {
            float x[EACH];
            load_logits(row, aligned, id, count, x);
            for (int i = 0; i < count; ++i) {
                const float changed = adjust(x[i], id + i);
                const u64 allowed_key = changed == -INF ? 0 : id_key(changed, id + i);
                const u64 key = isfinite(x[i]) ? allowed_key : NOT_FINITE;
                best = key > best ? key : best;
                if (logprobs) {
                    const u64 raw_key = id_key(x[i], id + i);
                    raw_best = raw_key > raw_best ? raw_key : raw_best;
                }
            }
        });
        if (logprobs) {
            raw_best = warp_largest(raw_best);
            if (threadIdx.x % WARP == 0) raw_keys[b * GROUPS + group] = raw_best;
        }
    }
    best = warp_largest(best);
    if (threadIdx.x % WARP == 0) group_keys[b * GROUPS + group] = best;
}

// Into segment_mass: the sum of the masses of a segment's ids whose weight is not below min_p.
template <typename Change>
__device__ __forceinline__ void sum_masses(const float* row, const Change& change, int limit,
                                           const Weights& weights, float min_p, u64* segment_mass) {
    __shared__ u64 scratch[SEGMENT_WARPS];
    const int group = blockIdx.x * SEGMENT_WARPS + threadIdx.x / WARP;
    MassSum sum;
    visit_values<Change::LOADS>(row, change, group, limit, [&](float x, int) {
        const float weight = weights(x);
        sum.add(weight >= min_p ? weight : 0.0f);
    });
    const u64 total = block_total(sum.total(), scratch);
    if (threadIdx.x == 0) *segment_mass = total;
}

// Adds the masses of a segment's ids to the row's histogram. A block's ids of a digit are counted
// and their rests added up: 32-bit additions, which shared memory has, and none needs a carry.
template <typename Change>
__device__ __forceinline__ void add_to_histogram(const float* row, const Change& change, int limit,
                                                 const Weights& weights, u64* histogram) {
    __shared__ u32 counts[DIGITS], rests[DIGITS];
    const int group = blockIdx.x * SEGMENT_WARPS + threadIdx.x / WARP;
    for (int d = threadIdx.x; d < DIGITS; d += SEGMENT_THREADS) counts[d] = rests[d] = 0;
    __syncthreads();
    visit_values<Change::LOADS>(row, change, group, limit, [&](float x, int) {
        const float weight = floored(weights(x));
        const int digit = digit_of(weight);
        if (digit < 0) return;
        atomicAdd(&counts[digit], 1u);
        atomicAdd(&rests[digit], rest_of(weight));
    });
    __syncthreads();
    for (int d = threadIdx.x; d < DIGITS; d += SEGMENT_THREADS) {
        if (counts[d]) atomicAdd(&histogram[d], mass_of_bin(d, counts[d], rests[d]));
    }
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(256) sample_masses_kernel(
    const float* __restrict__ logits, const int* __restrict__ rows,
    const int* __restrict__ state_slots, const int* __restrict__ features,
    const int* __restrict__ mask_rows, const u32* __restrict__ masks,
    const float* __restrict__ presence, const float* __restrict__ frequency,
    const float* __restrict__ repetition, const u32* output_counts,
    const u32* __restrict__ prompt_ids, const u32* __restrict__ allowed_ids,
    const int* __restrict__ listed_ids, const float* __restrict__ listed_biases,
    const int* __restrict__ num_listed, int max_listed, const float* __restrict__ temperature,
    const float* __restrict__ top_p, const float* __restrict__ min_p,
    const int* __restrict__ top_k, const int* __restrict__ num_logprobs,
    const u64* __restrict__ group_keys, const u64* __restrict__ raw_keys,
    u64* __restrict__ segment_masses, u64* __restrict__ raw_masses, u64* histograms, int vocab,
    int limit, int num_rows) {
    wait_for_earlier_kernels();
    static_assert(GROUPS == SEGMENT_THREADS, "a key a thread");
    __shared__ u64 scratch[SEGMENT_WARPS];
    __shared__ u32 listed_bits[LISTED_BITS / 32];
    const int step = gridDim.y, segment = blockIdx.x;
    // A lane looks at a row, all of them at once. Last rows first: the L2 may still hold them.
    for (int last = num_rows - 1 - static_cast<int>(blockIdx.y); last >= 0; last -= WARP * step) {
        const int own = last - static_cast<int>(threadIdx.x) % WARP * step;
        bool drawn = false, logprobs = false;
        if (own >= 0 && rows[own] >= 0) {
            const int slot = state_slots[own];
            drawn = temperature[slot] > 0.0f && !is_ranked(top_k[slot], limit);
            logprobs = num_logprobs[slot] >= 0;
        }
        const u32 all_drawn = __ballot_sync(ALL_LANES, drawn);
        const u32 all_logprobs = __ballot_sync(ALL_LANES, logprobs);
        for (u32 left = all_drawn | all_logprobs; left; left &= left - 1) {
            const int lane = __ffs(left) - 1, b = last - lane * step, slot = state_slots[b];
            const u64 best = block_largest(group_keys[b * GROUPS + threadIdx.x], scratch);
            if (best == NOT_FINITE || best == 0) continue;
            const float* row = logits + static_cast<long long>(rows[b]) * vocab;
            const int own_features = features ? features[b] : 0;
            const int mask_row = mask_rows ? mask_rows[b] : -1;
            const bool adjusted = own_features != 0 || mask_row >= 0;
            if (all_drawn >> lane & 1) {
                const Weights weights = weights_of(logit_of(best), temperature[slot]);
                u64* segment_mass = &segment_masses[b * SEGMENTS + segment];
                u64* histogram = histograms + b * DIGITS;
                const bool nucleus = top_p[slot] < 1.0f;
                if (adjusted) {
                    const AdjustmentArrays arrays = {
                        presence,    frequency,  repetition,    output_counts, prompt_ids,
                        allowed_ids, listed_ids, listed_biases, num_listed,    max_listed,
                        masks};
                    const Adjustments adjust = adjustments_of(arrays, own_features, slot, mask_row,
                                                              vocab, listed_bits);
                    if (nucleus) {
                        add_to_histogram(row, adjust, limit, weights, histogram);
                    } else {
                        sum_masses(row, adjust, limit, weights, min_p[slot], segment_mass);
                    }
                } else if (nucleus) {
                    add_to_histogram(row, Unchanged(), limit, weights, histogram);
                } else {
                    sum_masses(row, Unchanged(), limit, weights, min_p[slot], segment_mass);
                }
            }
            if (all_logprobs >> lane & 1) {
                const u64 raw_best =
                    adjusted ? block_largest(raw_keys[b * GROUPS + threadIdx.x], scratch) : best;
                sum_masses(row, Unchanged(), limit, weights_of(logit_of(raw_best), 1.0f), 0.0f,
                           &raw_masses[b * SEGMENTS + segment]);
            }
        }
    }
}

// The MAX_TOP largest logits as keys, largest first, into `keys`; returns how many there are.
template <typename Change>
__device__ __forceinline__ int largest_keys(const Row<Change>& row, u64* keys) {
    __shared__ u64 found[MAX_TOP];
    __shared__ int num_found;
    const int count = min(MAX_TOP, row.limit);
    if (largest_candidates(row, count, keys)) return count;
    const u32 least = static_cast<u32>(select_from_top<32>(
        row.limit, count, row.bins, row.scratch, [&](int i) { return u64(ordered(row.value(i))); },
        [](int, u64) { return 1ull; }));
    if (threadIdx.x == 0) num_found = 0;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < row.limit; i += THREADS) {
        const float x = row.value(i);
        if (ordered(x) > least) found[atomicAdd(&num_found, 1)] = id_key(x, i);
    }
    __syncthreads();
    u64 last = NOT_FINITE;  // of those equal to the least one, the smallest ids: largest keys
    for (int n = num_found; n < count; ++n) {
        u64 best = 0;
#pragma unroll 1
        for (int i = threadIdx.x; i < row.limit; i += THREADS) {
            const float x = row.value(i);
            const u64 key = id_key(x, i);
            if (ordered(x) == least && key < last && key > best) best = key;
        }
        last = block_largest(best, row.scratch);
        if (threadIdx.x == 0) found[n] = last;
    }
    __syncthreads();
    if (static_cast<int>(threadIdx.x) < count) {
        int rank = 0;
        for (int i = 0; i < count; ++i) rank += found[i] > found[threadIdx.x];
        keys[rank] = found[threadIdx.x];
    }
    __syncthreads();
    return count;
}

extern "C" __global__ void __launch_bounds__(1024, 1) sample_kernel(
    const float* __restrict__ logits, const int* __restrict__ rows,
    const int* __restrict__ state_slots, const int* __restrict__ positions,
    const int* __restrict__ features, const int* __restrict__ mask_rows,
    const u32* __restrict__ masks, const float* __restrict__ presence,
    const float* __restrict__ frequency, const float* __restrict__ repetition, u32* output_counts,
    const u32* __restrict__ prompt_ids, const u32* __restrict__ allowed_ids,
    const int* __restrict__ listed_ids, const float* __restrict__ listed_biases,
    const int* __restrict__ num_listed, int max_listed, const float* __restrict__ temperature,
    const float* __restrict__ top_p, const float* __restrict__ min_p,
    const int* __restrict__ top_k, const u64* __restrict__ seed,
    const int* __restrict__ num_logprobs, const u64* __restrict__ group_keys,
    const u64* __restrict__ raw_keys, const u64* __restrict__ segment_masses,
    const u64* __restrict__ raw_masses, const u64* __restrict__ histograms, int* next_ids,
    int* out_ids, float* out_logprobs, int* out_top_ids, float* out_top_logprobs, int vocab,
    int limit) {
    wait_for_earlier_kernels();
    __shared__ u64 bins[BINS], scratch[THREADS / WARP], own_keys[GROUPS], keys[MAX_TOP];
    __shared__ u32 listed_bits[LISTED_BITS / 32], listed[MAX_LISTED_MASSES];
    __shared__ Adjustments adjust;
    __shared__ u64 bits;
    __shared__ int slot, own_features, mask_row;
    const int i = blockIdx.x;
    if (rows[i] < 0) return;
    if (threadIdx.x == 0) {
        slot = state_slots[i];
        own_features = features ? features[i] : 0;
        mask_row = mask_rows ? mask_rows[i] : -1;
    }
    if (threadIdx.x < GROUPS) own_keys[threadIdx.x] = group_keys[i * GROUPS + threadIdx.x];
    const u64 best = block_largest(threadIdx.x < GROUPS ? own_keys[threadIdx.x] : 0, scratch);
    if (best == NOT_FINITE || best == 0) {
        if (threadIdx.x == 0) {
            out_ids[i] = best == 0 ? NOTHING_ALLOWED_ID : NOT_FINITE_ID;
            next_ids[slot] = 0;
        }
        return;
    }
    const float* values = logits + static_cast<long long>(rows[i]) * vocab;
    const Unchanged unchanged;
    int id = id_of(best);
    if (temperature[slot] > 0.0f) {
        const Weights weights = weights_of(logit_of(best), temperature[slot]);
        const u64 *masses = segment_masses + i * SEGMENTS, *histogram = histograms + i * DIGITS;
        if (threadIdx.x == 0) bits = random_bits(seed[slot], static_cast<u64>(positions[i]));
        __syncthreads();
        if (own_features != 0 || mask_row >= 0) {
            const AdjustmentArrays arrays = {presence,   frequency,   repetition, output_counts,
                                             prompt_ids, allowed_ids, listed_ids, listed_biases,
                                             num_listed, max_listed,  masks};
            const Adjustments own =
                adjustments_of(arrays, own_features, slot, mask_row, vocab, listed_bits);
            if (threadIdx.x == 0) adjust = own;  // in shared memory: registers are short here
            __syncthreads();
            const Row<Adjustments> row = {values,   adjust, limit,   weights,
                                          own_keys, bins,   scratch, listed};
            id = draw(row, top_k[slot], top_p[slot], min_p[slot], bits, masses, histogram);
        } else {
            const Row<Unchanged> row = {values,   unchanged, limit,   weights,
                                        own_keys, bins,      scratch, listed};
            id = draw(row, top_k[slot], top_p[slot], min_p[slot], bits, masses, histogram);
        }
    }
    if (threadIdx.x == 0) {
        out_ids[i] = id;
        next_ids[slot] = id;
        if (own_features & PENALTIES) count_id(output_counts, slot, vocab, id);
    }
    if (num_logprobs[slot] < 0) return;

    // log-probabilities are of the raw logits
    static_assert(SEGMENTS == WARP, "a lane a segment");
    u64 total = raw_masses[i * SEGMENTS + threadIdx.x % WARP];
    for (int step = WARP / 2; step > 0; step /= 2) {
        total += __shfl_xor_sync(ALL_LANES, total, step);
    }
    if ((own_features != 0 || mask_row >= 0) && threadIdx.x < GROUPS) {
        own_keys[threadIdx.x] = raw_keys[i * GROUPS + threadIdx.x];
    }
    const u64 raw_best = block_largest(threadIdx.x < GROUPS ? own_keys[threadIdx.x] : 0, scratch);
    const float largest = logit_of(raw_best);
    const Row<Unchanged> row = {values,   unchanged, limit,  weights_of(largest, 1.0f),
                                own_keys, bins,      scratch, listed};
    const float log_total =
        static_cast<float>(log(static_cast<double>(total) / static_cast<double>(1ull << 40)));
    const int count = largest_keys(row, keys);
    if (threadIdx.x == 0) out_logprobs[i] = (values[id] - largest) - log_total;
    if (threadIdx.x < MAX_TOP) {
        const int n = threadIdx.x;
        const int top_id = n < count ? id_of(keys[n]) : -1;
        out_top_ids[i * MAX_TOP + n] = top_id;
        out_top_logprobs[i * MAX_TOP + n] =
            n < count ? (values[top_id] - largest) - log_total : -INF;
    }
}
