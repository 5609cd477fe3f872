// sample: one id a row of fp32 logits. Formulas: engine/ops/numpy/sampling.py, followed to the bit
// but for expf.
//
// sample_segments_kernel, grid (SEGMENTS, B): the largest key of each part of each row, or
// NOT_FINITE. sample_kernel, grid (B), 1024 threads: the row's id. Greedy rows end after joining
// their segments. Others select by radix: a histogram over one digit of all keys still in question,
// then the digit at which the running sum, from the top, reaches the wanted count (top-k: of ids)
// or mass (top-p), then the next digit. No sort, and no float is ever added.
//
// logits [*, vocab]; row i of the batch is logits[rows[i]], of state_slots[i], at positions[i]; a
// row below 0 is padding. Parameters by slot. segment_keys [B, SEGMENTS].
// Check and time: tools/gpu_check.py --only sample
#include "sampling.cuh"

constexpr int SEGMENTS = 32;
constexpr int THREADS = 1024;
constexpr int DIGIT_BITS = 11;
constexpr int BINS = 1 << DIGIT_BITS;
constexpr int MASS_BITS = 41;  // a mass is at most 2^40
constexpr int MAX_TOP = 20;

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
        for (int i = threadIdx.x; i < limit; i += THREADS) {
            const u64 value = key(i);
            if (value >> (shift + DIGIT_BITS) == prefix) {
                const u64 added = amount(i, value);
                if (added) atomicAdd(&bins[value >> shift & (BINS - 1)], added);
            }
        }
        prefix = prefix << DIGIT_BITS | static_cast<u64>(select_digit(bins, scratch, wanted));
    }
    return prefix;
}

extern "C" __global__ void __launch_bounds__(256) sample_segments_kernel(
    const float* __restrict__ logits, const int* __restrict__ rows,
    u64* __restrict__ segment_keys, int vocab, int limit) {
    __shared__ u64 scratch[WARP];
    if (rows[blockIdx.y] < 0) return;
    const float* row = logits + static_cast<long long>(rows[blockIdx.y]) * vocab;
    const int length = (limit + SEGMENTS - 1) / SEGMENTS;
    const int begin = blockIdx.x * length, end = min(begin + length, limit);
    u64 best = 0;
    for (int i = begin + threadIdx.x; i < end; i += blockDim.x) {
        const float x = row[i];
        const u64 key = isfinite(x) ? id_key(x, i) : NOT_FINITE;
        best = key > best ? key : best;
    }
    best = block_largest(best, scratch);
    if (threadIdx.x == 0) segment_keys[blockIdx.y * SEGMENTS + blockIdx.x] = best;
}

struct Row {
    const float* logits;
    int limit;
    float largest;
    u64* bins;
    u64* scratch;
};

// One id by inverse CDF over the masses that top-k, top-p and min-p leave.
__device__ __forceinline__ int draw(const Row& row, float temperature, int top_k, float top_p,
                                    float min_p, u64 bits) {
    __shared__ u64 warp_masses[THREADS / WARP];
    __shared__ int result;
    u32 least_logit = 0;
    if (top_k > 0 && top_k < row.limit) {
        least_logit = static_cast<u32>(select_from_top<32>(
            row.limit, top_k, row.bins, row.scratch,
            [&](int i) { return u64(ordered(row.logits[i])); }, [](int, u64) { return 1ull; }));
    }
    const auto weight = [&](int i) {
        const float x = row.logits[i];
        return ordered(x) >= least_logit ? expf((x - row.largest) / temperature) : 0.0f;
    };
    u64 least_mass = 0;
    if (top_p < 1.0f) {
        u64 total = 0;
        for (int i = threadIdx.x; i < row.limit; i += THREADS) total += mass_of(weight(i));
        total = block_total(total, row.scratch);
        const u64 share = static_cast<u64>(static_cast<double>(top_p) * 9223372036854775808.0);
        u64 needed = __umul64hi(2 * total, share);
        needed = needed ? needed : 1;
        least_mass = select_from_top<MASS_BITS>(
            row.limit, needed, row.bins, row.scratch, [&](int i) { return mass_of(weight(i)); },
            [](int, u64 mass) { return mass; });
    }
    const auto kept_mass = [&](int i) {
        const float w = weight(i);
        const u64 mass = mass_of(w);
        return mass >= least_mass && w >= min_p ? mass : 0;
    };

    // Each warp owns a run of ids: first their totals, then a scan of the one run with the target.
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int run = (row.limit + THREADS - 1) / THREADS * WARP;
    const int begin = min(warp * run, row.limit), end = min(begin + run, row.limit);
    u64 sum = 0;
    for (int i = begin + lane; i < end; i += WARP) sum += kept_mass(i);
    for (int step = WARP / 2; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    if (lane == 0) warp_masses[warp] = sum;
    __syncthreads();
    u64 total = 0, before = 0;
    for (int w = 0; w < THREADS / WARP; ++w) {
        before += w < warp ? warp_masses[w] : 0;
        total += warp_masses[w];
    }
    const u64 target = __umul64hi(bits, total);
    if (before <= target && target < before + sum) {
        for (int first = begin; first < end; first += WARP) {
            const u64 mass = first + lane < end ? kept_mass(first + lane) : 0;
            u64 through = mass;
            for (int step = 1; step < WARP; step *= 2) {
                const u64 other = __shfl_up_sync(ALL_LANES, through, step);
                if (lane >= step) through += other;
            }
            const unsigned reached = __ballot_sync(ALL_LANES, before + through > target);
            if (reached) {
                if (lane == 0) result = first + __ffs(reached) - 1;
                break;
            }
            before += __shfl_sync(ALL_LANES, through, WARP - 1);
        }
    }
    __syncthreads();
    return result;
}

// The MAX_TOP largest logits as keys, largest first, into `keys`; returns how many there are.
__device__ __forceinline__ int largest_keys(const Row& row, u64* keys) {
    __shared__ u64 found[MAX_TOP];
    __shared__ int num_found;
    const int count = min(MAX_TOP, row.limit);
    const u32 least = static_cast<u32>(select_from_top<32>(
        row.limit, count, row.bins, row.scratch, [&](int i) { return u64(ordered(row.logits[i])); },
        [](int, u64) { return 1ull; }));
    if (threadIdx.x == 0) num_found = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < row.limit; i += THREADS) {
        const float x = row.logits[i];
        if (ordered(x) > least) found[atomicAdd(&num_found, 1)] = id_key(x, i);
    }
    __syncthreads();
    u64 last = NOT_FINITE;  // of those equal to the least one, the smallest ids: largest keys
    for (int n = num_found; n < count; ++n) {
        u64 best = 0;
        for (int i = threadIdx.x; i < row.limit; i += THREADS) {
            const u64 key = id_key(row.logits[i], i);
            if (ordered(row.logits[i]) == least && key < last && key > best) best = key;
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
    const float* __restrict__ temperature, const float* __restrict__ top_p,
    const float* __restrict__ min_p, const int* __restrict__ top_k, const u64* __restrict__ seed,
    const int* __restrict__ num_logprobs, const u64* __restrict__ segment_keys, int* next_ids,
    int* out_ids, float* out_logprobs, int* out_top_ids, float* out_top_logprobs, int vocab,
    int limit) {
    __shared__ u64 bins[BINS], scratch[THREADS / WARP], keys[MAX_TOP];
    const int i = blockIdx.x;
    if (rows[i] < 0) return;
    const int slot = state_slots[i];
    u64 best = 0;
    for (int s = 0; s < SEGMENTS; ++s) {
        const u64 key = segment_keys[i * SEGMENTS + s];
        best = key > best ? key : best;
    }
    if (best == NOT_FINITE) {
        if (threadIdx.x == 0) {
            out_ids[i] = -1;
            next_ids[slot] = 0;
        }
        return;
    }
    const float* values = logits + static_cast<long long>(rows[i]) * vocab;
    const Row row = {values, limit, values[id_of(best)], bins, scratch};
    int id = id_of(best);
    if (temperature[slot] > 0.0f) {
        id = draw(row, temperature[slot], top_k[slot], top_p[slot], min_p[slot],
                  random_bits(seed[slot], static_cast<u64>(positions[i])));
    }
    if (threadIdx.x == 0) {
        out_ids[i] = id;
        next_ids[slot] = id;
    }
    if (num_logprobs[slot] < 0) return;

    u64 total = 0;
    for (int j = threadIdx.x; j < limit; j += THREADS) {
        total += mass_of(expf(values[j] - row.largest));
    }
    total = block_total(total, scratch);
    const float log_total =
        static_cast<float>(log(static_cast<double>(total) / static_cast<double>(1ull << 40)));
    const int count = largest_keys(row, keys);
    if (threadIdx.x == 0) out_logprobs[i] = (values[id] - row.largest) - log_total;
    if (threadIdx.x < MAX_TOP) {
        const int n = threadIdx.x;
        const int top_id = n < count ? id_of(keys[n]) : -1;
        out_top_ids[i * MAX_TOP + n] = top_id;
        out_top_logprobs[i * MAX_TOP + n] =
            n < count ? (values[top_id] - row.largest) - log_total : -INF;
    }
}
