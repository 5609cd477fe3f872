// The second half of decode attention: adds the splits of each row, in order, and gates the sum.
//
//     out = softmax(q k^T / 16) v  >act  * (sigmoid(gate) >act)  >act
//
//     partial_out fp32 [items, NQ, 256] and partial_stats fp32 [items, NQ, 2], of attention_decode;
//     first_items: from prepare_decode; qgkv act [B, (2 NQ + 2 NKV) * 256]; out act [B, NQ * 256]
//
// Grid (NQ, B), 64 threads. A row without items is padding: zeros.
// Formula: spec section 3.4. Check and time: tools/gpu_check.py --only attention_decode
#include "common.cuh"
#include "decode_work.cuh"

constexpr int D = 256;
constexpr int THREADS = D / 4;
static_assert(MAX_SPLITS <= THREADS);

// A thread a split for the weights, then 4 dims a thread.
extern "C" __global__ void __launch_bounds__(THREADS) attention_combine_kernel(
    const float* __restrict__ partial_out, const float* __restrict__ partial_stats,
    const int* __restrict__ first_items, const bf16* __restrict__ qgkv, bf16* __restrict__ out,
    int NQ, int NKV) {
    wait_for_earlier_kernels();
    __shared__ float factors[THREADS], sums[THREADS], warp_largest[2];
    const int head = blockIdx.x, row = blockIdx.y, i = threadIdx.x, dim = threadIdx.x * 4;
    const int begin = first_items[row], splits = first_items[row + 1] - begin;
    float gate[4];
    const long long gate_head = static_cast<long long>(row) * (2 * NQ + 2 * NKV) + NQ + head;
    load_floats(qgkv + gate_head * D + dim, gate);
    const long long first = static_cast<long long>(begin) * NQ + head;
    float2 stat = make_float2(-INF, 0.0f);
    if (i < splits) {
        stat = *reinterpret_cast<const float2*>(
            partial_stats + (first + static_cast<long long>(i) * NQ) * 2);
    }
    const float largest_of_warp = warp_max(stat.x);
    if (i % WARP == 0) warp_largest[i / WARP] = largest_of_warp;
    __syncthreads();
    factors[i] = i < splits ? exp2f(stat.x - fmaxf(warp_largest[0], warp_largest[1])) : 0.0f;
    sums[i] = stat.y * factors[i];
    __syncthreads();
    float values[4] = {}, total = 0.0f;
#pragma unroll 8
    for (int split = 0; split < splits; ++split) {
        const float4 part = *reinterpret_cast<const float4*>(
            partial_out + (first + static_cast<long long>(split) * NQ) * D + dim);
        const float factor = factors[split];
        total += sums[split];
        values[0] = fmaf(part.x, factor, values[0]);
        values[1] = fmaf(part.y, factor, values[1]);
        values[2] = fmaf(part.z, factor, values[2]);
        values[3] = fmaf(part.w, factor, values[3]);
    }
#pragma unroll
    for (int d = 0; d < 4; ++d) {
        const float attended = splits > 0 ? round_act(values[d] / total) : 0.0f;
        values[d] = attended * round_act(sigmoid(gate[d]));
    }
    store_act(values, out + (static_cast<long long>(row) * NQ + head) * D + dim);
}
