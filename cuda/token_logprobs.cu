// token_logprobs: the log-probability and rank of one given id of each row of fp32 logits, and the
// likeliest ids. Formulas: engine/ops/numpy/token_logprobs.py and sampling.py, to the bit but for
// expf.
//
// Grid (N), 1024 threads a row; two passes over the row. Thread t reads ids t, t + 1024, ...: its
// group. The first pass finds each group's largest key (of the pair logit, id: no two are equal).
// The MAX_TOP largest ids are all in the MAX_TOP groups with the largest of these, and none of them
// is below the least of those, so the few ids that are in question are gathered from these groups
// and ranked by comparing each with each. The second pass adds masses and counts what is at least as
// large as the row's target. No sort, and no float is ever added.
//
// logits [N, vocab]; ids from `limit` on do not count. A row that is not finite gets rank -1 and
// nothing else. out_top_* [N, MAX_TOP] are left as they are when num_top is 0.
// Check: tools/gpu_check.py --only token_logprobs. Time: tools/bench_ops.py
#include "sampling.cuh"

constexpr int THREADS = 1024;
constexpr int MAX_TOP = 20;
constexpr int MAX_GROUP = 244;  // ids of a group: what 48 KiB of shared memory have room for

extern "C" __global__ void __launch_bounds__(1024, 1) token_logprobs_kernel(
    const float* __restrict__ logits, const int* __restrict__ target_ids, float* out_logprobs,
    int* out_ranks, int* out_top_ids, float* out_top_logprobs, int vocab, int limit, int num_top) {
    wait_for_earlier_kernels();
    __shared__ u64 group_keys[THREADS], candidates[MAX_TOP * MAX_GROUP], scratch[THREADS / WARP];
    __shared__ int groups[MAX_TOP];
    __shared__ int num_candidates;
    const int thread = threadIdx.x, row_index = blockIdx.x;
    const float* row = logits + static_cast<long long>(row_index) * vocab;

    u64 best = 0;
    for (int i = thread; i < limit; i += THREADS) {
        const float x = row[i];
        const u64 key = isfinite(x) ? id_key(x, i) : NOT_FINITE;
        best = key > best ? key : best;
    }
    group_keys[thread] = best;
    if (thread == 0) num_candidates = 0;
    const u64 largest_key = block_largest(best, scratch);
    if (largest_key == NOT_FINITE) {
        if (thread == 0) out_ranks[row_index] = -1;
        return;
    }

    const float largest = row[id_of(largest_key)];
    const float target = row[target_ids[row_index]];
    u64 total = 0;
    int at_least = 0;
    for (int i = thread; i < limit; i += THREADS) {
        const float x = row[i];
        total += mass_of(expf(x - largest));
        at_least += x >= target;
    }
    total = block_total(total, scratch);
    at_least = block_total(at_least, reinterpret_cast<int*>(scratch));
    const float log_total =
        static_cast<float>(log(static_cast<double>(total) / static_cast<double>(1ull << 40)));
    if (thread == 0) {
        out_logprobs[row_index] = (target - largest) - log_total;
        out_ranks[row_index] = at_least;
    }
    if (num_top == 0) return;

    const int count = min(MAX_TOP, limit);
    int rank = 0;
    for (int t = 0; t < THREADS; ++t) rank += group_keys[t] > best;
    if (rank < count) groups[rank] = thread;
    __syncthreads();
    const u64 least = group_keys[groups[count - 1]];
    for (int g = thread / WARP; g < count; g += THREADS / WARP) {
        const int group = groups[g];
        for (int i = group + thread % WARP * THREADS; i < limit; i += WARP * THREADS) {
            const u64 key = id_key(row[i], i);
            if (key >= least) candidates[atomicAdd(&num_candidates, 1)] = key;
        }
    }
    __syncthreads();
    const int found = num_candidates;
    for (int c = thread; c < found; c += THREADS) {
        const u64 key = candidates[c];
        int above = 0;
        for (int other = 0; other < found; ++other) above += candidates[other] > key;
        if (above < count) {
            const int id = id_of(key);
            out_top_ids[row_index * MAX_TOP + above] = id;
            out_top_logprobs[row_index * MAX_TOP + above] = (row[id] - largest) - log_total;
        }
    }
    if (thread >= count && thread < MAX_TOP) {
        out_top_ids[row_index * MAX_TOP + thread] = -1;
        out_top_logprobs[row_index * MAX_TOP + thread] = -INF;
    }
}
