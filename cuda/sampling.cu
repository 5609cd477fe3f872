// sample: one id a row of fp32 logits. Formulas: engine/ops/numpy/sampling.py and
// logit_adjustments.py, followed to the bit but for expf.
//
// sample_segments_kernel, grid (SEGMENTS, B): the largest key of each group of ids of each row,
// NOT_FINITE, or 0 where no id may be sampled. sample_kernel, grid (B), 1024 threads: the row's id.
// Greedy rows end after joining their groups. Others draw from the likeliest ids (candidates.cuh),
// or where those are not enough select by radix among all (radix_select.cuh).
//
// logits [*, vocab]; row i of the batch is logits[rows[i]], of state_slots[i], at positions[i]; a
// row below 0 is padding. Parameters by slot. group_keys [B, GROUPS]. Rows without features
// (null: none has any) and without a mask (the same) read nothing but their logits.
// sample_kernel has 64 registers a thread, so loops whose speed does not matter are not unrolled.
// Check: tools/gpu_check.py --only sample. Time: tools/bench_ops.py
#include "candidates.cuh"
#include "logit_adjustments.cuh"

constexpr int MASS_BITS = 41;  // a mass is at most 2^40
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
    const int* __restrict__ num_listed, int max_listed, u64* __restrict__ group_keys, int vocab,
    int limit) {
    wait_for_earlier_kernels();
    __shared__ u32 listed_bits[LISTED_BITS / 32];
    const int b = blockIdx.y;
    if (rows[b] < 0) return;
    const float* row = logits + static_cast<long long>(rows[b]) * vocab;
    const int group = blockIdx.x * SEGMENT_WARPS + threadIdx.x / WARP;
    const int own_features = features ? features[b] : 0, mask_row = mask_rows ? mask_rows[b] : -1;
    const bool aligned = is_aligned(row);
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
        visit_group<1>(group, limit, [&](int id, int count) {
            float x[EACH];
            load_logits(row, aligned, id, count, x);
            for (int i = 0; i < count; ++i) {
                const float changed = adjust(x[i], id + i);
                const u64 allowed_key = changed == -INF ? 0 : id_key(changed, id + i);
                const u64 key = isfinite(x[i]) ? allowed_key : NOT_FINITE;
                best = key > best ? key : best;
            }
        });
    }
    best = warp_largest(best);
    if (threadIdx.x % WARP == 0) group_keys[b * GROUPS + group] = best;
}

// One id by inverse CDF over the masses that top-k, top-p and min-p leave.
template <typename Change>
__device__ __forceinline__ int draw(const Row<Change>& row, float temperature, int top_k,
                                    float top_p, float min_p, u64 bits) {
    __shared__ u64 warp_masses[THREADS / WARP];
    __shared__ int result;
    int id;
    if (draw_candidates(row, temperature, top_k, top_p, min_p, bits, id)) return id;
    u32 least_logit = 0;
    if (top_k > 0 && top_k < row.limit) {
        least_logit = static_cast<u32>(select_from_top<32>(
            row.limit, top_k, row.bins, row.scratch,
            [&](int i) { return u64(ordered(row.value(i))); }, [](int, u64) { return 1ull; }));
    }
    const auto weight = [&](int i) {
        const float x = row.value(i);
        return ordered(x) >= least_logit ? expf((x - row.largest) / temperature) : 0.0f;
    };
    u64 least_mass = 0;
    if (top_p < 1.0f) {
        u64 total = 0;
        for (int i = threadIdx.x; i < row.limit; i += THREADS) total += mass_of(weight(i));
        total = block_total(total, row.scratch);
        least_mass = least_mass_of_share<MASS_BITS>(
            row.limit, share_of(top_p, total), row.bins, row.scratch,
            [&](int i) { return mass_of(weight(i)); });
    }
    const auto kept_mass = [&](int i) {
        const float w = weight(i);
        const u64 mass = mass_of(w);
        return mass >= least_mass && w >= min_p ? mass : 0;
    };

    // Each warp owns a run of ids. First their totals; then all threads share the run with the
    // target, each a few ids in a row.
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int run = (row.limit + THREADS - 1) / THREADS * WARP;
    const int begin = min(warp * run, row.limit), end = min(begin + run, row.limit);
    u64 sum = 0;
    for (int i = begin + lane; i < end; i += WARP) sum += kept_mass(i);
    for (int step = WARP / 2; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    if (lane == 0) warp_masses[warp] = sum;
    __syncthreads();
    u64 total = 0;
#pragma unroll 4
    for (int w = 0; w < THREADS / WARP; ++w) total += warp_masses[w];
    const u64 target = __umul64hi(bits, total);
    u64 before = 0;
    int chosen = 0;
    for (; before + warp_masses[chosen] <= target; ++chosen) before += warp_masses[chosen];
    __syncthreads();

    const int own_ids = run / THREADS + (run % THREADS != 0);
    const int first = chosen * run + static_cast<int>(threadIdx.x) * own_ids;
    const int last = min(min(first + own_ids, (chosen + 1) * run), row.limit);
    u64 own = 0;
#pragma unroll 1
    for (int i = first; i < last; ++i) own += kept_mass(i);
    u64 through = own;
    for (int step = 1; step < WARP; step *= 2) {
        const u64 other = __shfl_up_sync(ALL_LANES, through, step);
        if (lane >= step) through += other;
    }
    if (lane == WARP - 1) warp_masses[warp] = through;
    __syncthreads();
    before += through - own;
    for (int w = 0; w < warp; ++w) before += warp_masses[w];
    if (before <= target && target < before + own) {
        int at = first;
        for (u64 mass = kept_mass(at); before + mass <= target; mass = kept_mass(++at)) {
            before += mass;
        }
        result = at;
    }
    __syncthreads();
    return result;
}

// The MAX_TOP largest raw logits as keys, largest first, into `keys`; returns how many there are.
// `has_candidates`: the row's groups are of its raw logits.
template <typename Change>
__device__ __forceinline__ int largest_keys(const Row<Change>& row, bool has_candidates,
                                            u64* keys) {
    __shared__ u64 found[MAX_TOP];
    __shared__ int num_found;
    const int count = min(MAX_TOP, row.limit);
    if (has_candidates && largest_candidates(row, count, keys)) return count;
    const u32 least = static_cast<u32>(select_from_top<32>(
        row.limit, count, row.bins, row.scratch, [&](int i) { return u64(ordered(row.value(i))); },
        [](int, u64) { return 1ull; }));
    if (threadIdx.x == 0) num_found = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < row.limit; i += THREADS) {
        const float x = row.value(i);
        if (ordered(x) > least) found[atomicAdd(&num_found, 1)] = id_key(x, i);
    }
    __syncthreads();
    u64 last = NOT_FINITE;  // of those equal to the least one, the smallest ids: largest keys
    for (int n = num_found; n < count; ++n) {
        u64 best = 0;
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
    const int* __restrict__ num_logprobs, const u64* __restrict__ group_keys, int* next_ids,
    int* out_ids, float* out_logprobs, int* out_top_ids, float* out_top_logprobs, int vocab,
    int limit) {
    wait_for_earlier_kernels();
    __shared__ u64 bins[BINS], scratch[THREADS / WARP], own_keys[GROUPS], keys[MAX_TOP];
    __shared__ u32 listed_bits[LISTED_BITS / 32];
    __shared__ Adjustments adjust;
    const int i = blockIdx.x;
    if (rows[i] < 0) return;
    const int slot = state_slots[i];
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
    const int own_features = features ? features[i] : 0, mask_row = mask_rows ? mask_rows[i] : -1;
    const bool adjusted = own_features != 0 || mask_row >= 0;
    const auto unchanged = [](float x, int) { return x; };
    float largest = logit_of(best);
    int id = id_of(best);
    if (temperature[slot] > 0.0f) {
        const u64 bits = random_bits(seed[slot], static_cast<u64>(positions[i]));
        if (adjusted) {
            const AdjustmentArrays arrays = {presence,   frequency,   repetition, output_counts,
                                             prompt_ids, allowed_ids, listed_ids, listed_biases,
                                             num_listed, max_listed,  masks};
            const Adjustments own =
                adjustments_of(arrays, own_features, slot, mask_row, vocab, listed_bits);
            if (threadIdx.x == 0) adjust = own;  // in shared memory: registers are short here
            __syncthreads();
            const Row<Adjustments> row = {values, adjust, limit, largest, own_keys, bins, scratch};
            id = draw(row, temperature[slot], top_k[slot], top_p[slot], min_p[slot], bits);
        } else {
            const Row<decltype(unchanged)> row = {values,   unchanged, limit,  largest,
                                                  own_keys, bins,      scratch};
            id = draw(row, temperature[slot], top_k[slot], top_p[slot], min_p[slot], bits);
        }
    }
    if (threadIdx.x == 0) {
        out_ids[i] = id;
        next_ids[slot] = id;
        if (own_features & PENALTIES) count_id(output_counts, slot, vocab, id);
    }
    if (num_logprobs[slot] < 0) return;

    if (adjusted) {  // log-probabilities are of the raw logits
        u64 own = 0;
        for (int j = threadIdx.x; j < limit; j += THREADS) {
            const u64 key = id_key(values[j], j);
            own = key > own ? key : own;
        }
        largest = logit_of(block_largest(own, scratch));
    }
    const Row<decltype(unchanged)> row = {values, unchanged, limit, largest, own_keys, bins, scratch};
    const u64 total = row_total(row, [&](float x) { return mass_of(expf(x - largest)); });
    const float log_total =
        static_cast<float>(log(static_cast<double>(total) / static_cast<double>(1ull << 40)));
    const int count = largest_keys(row, !adjusted, keys);
    if (threadIdx.x == 0) out_logprobs[i] = (values[id] - largest) - log_total;
    if (threadIdx.x < MAX_TOP) {
        const int n = threadIdx.x;
        const int top_id = n < count ? id_of(keys[n]) : -1;
        out_top_ids[i * MAX_TOP + n] = top_id;
        out_top_logprobs[i * MAX_TOP + n] =
            n < count ? (values[top_id] - largest) - log_total : -INF;
    }
}
