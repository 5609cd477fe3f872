// Paged attention of one query row a sequence, in splits of the context, then their combination.
//
//     out = softmax(q k^T / 16) v  >act  * (sigmoid(gate) >act)  >act
//
//     q act [B, NQ, 256]; query head j reads KV head j / (NQ / NKV), at most 8 query heads each
//     k_cache, v_cache act [blocks, NKV, block_size, 256]; block_size a multiple of 16
//     work_items, first_items: from prepare_decode. partial_out fp32 [items, NQ, 256] (not yet
//     divided by the sum of weights), partial_stats fp32 [items, NQ, 2]: maximum (of the score
//     times log2 e) and sum of weights
//
// attention_decode_kernel, grid: any, persistent over (work item, KV head). A block's 4 warps take
// the 16-token groups of the split in turn. Tokens are the rows of the tensor core's left operand
// and the query heads of one KV head its 8 columns:
//
//     S [16 tokens, 8 heads]  = K [16 tokens, 256] Q^T
//     O [256 dims, 8 heads]  += V^T [256 dims, 16 tokens] P
//
// K and V go from memory to registers by 16-byte loads: which dim plays which k (or m) index of an
// instruction is ours to choose, as long as Q (or the store) uses the same choice. A lane's 8
// consecutive dims of K are k = 2t, 2t+1, 2t+8, 2t+9 of two instructions; its 8 consecutive dims of
// V are m = g and g + 8 of four.
//
// attention_combine_kernel, grid (NQ, B), 64 threads: adds the splits in order.
// Formula: spec section 3.4. Check and time: tools/gpu_check.py --only attention_decode
#include "decode_splits.cuh"
#include "tensor_core.cuh"

constexpr int D = 256;
constexpr int WARPS = 4;
constexpr int GROUP = 16;            // tokens of a warp's step
constexpr int HEADS = 8;             // columns: query heads of a KV head, padded
constexpr int CHUNKS = D / 32;       // 16-byte pieces of a row of K that a lane loads
constexpr int SPANS = D / 64;        // of V
constexpr float SCALE = 1.4426950408889634f / 16.0f;  // log2(e) / sqrt(D)

struct WarpState {
    float o[SPANS * 4][4];
    float largest[2];  // of heads 2t, 2t + 1
    float sum[2];      // this lane's tokens only
};

__device__ inline float max_over_tokens(float x) {
#pragma unroll
    for (int step = 4; step < WARP; step *= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    return x;
}

__device__ inline float sum_over_tokens(float x) {
#pragma unroll
    for (int step = 4; step < WARP; step *= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

// One group of 16 tokens, of which the first `count` exist; k and v point at the first one's row.
// Rows that do not exist are not read: the last one is read again, with weight 0.
__device__ inline void attend_group(WarpState& state, const uint4 (&q)[CHUNKS], const bf16* k,
                                    const bf16* v, int count, int g, int t) {
    const uint4* low = reinterpret_cast<const uint4*>(k + min(g, count - 1) * D) + t;
    const uint4* high = reinterpret_cast<const uint4*>(k + min(g + 8, count - 1) * D) + t;
    uint4 k_low[CHUNKS], k_high[CHUNKS];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        k_low[c] = low[c * 4];
        k_high[c] = high[c * 4];
    }
    float s[4] = {};
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        mma_bf16(s, k_low[c].x, k_high[c].x, k_low[c].y, k_high[c].y, q[c].x, q[c].y);
        mma_bf16(s, k_low[c].z, k_high[c].z, k_low[c].w, k_high[c].w, q[c].z, q[c].w);
    }
    float correction[2], p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = g + i / 2 * 8 < count ? s[i] * SCALE : -INF;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float largest = fmaxf(state.largest[i], max_over_tokens(fmaxf(s[i], s[i + 2])));
        correction[i] = exp2f(state.largest[i] - largest);
        p[i] = exp2f(s[i] - largest);
        p[i + 2] = exp2f(s[i + 2] - largest);
        state.sum[i] = state.sum[i] * correction[i] + (p[i] + p[i + 2]);
        state.largest[i] = largest;
    }
    const unsigned b0 = transpose_8x8(pack_act(p[0], p[1]));
    const unsigned b1 = transpose_8x8(pack_act(p[2], p[3]));
#pragma unroll
    for (int span = 0; span < SPANS; ++span) {
        uint4 rows[4];  // tokens 2t, 2t+1, 2t+8, 2t+9
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int token = min(2 * t + i % 2 + i / 2 * 8, count - 1);
            rows[i] = *reinterpret_cast<const uint4*>(v + token * D + span * 64 + g * 8);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float (&o)[4] = state.o[span * 4 + j];
#pragma unroll
            for (int i = 0; i < 4; ++i) o[i] *= correction[i % 2];
            const unsigned r0 = (&rows[0].x)[j], r1 = (&rows[1].x)[j];
            const unsigned r2 = (&rows[2].x)[j], r3 = (&rows[3].x)[j];
            mma_bf16(o, lower_halves(r0, r1), upper_halves(r0, r1), lower_halves(r2, r3),
                     upper_halves(r2, r3), b0, b1);
        }
    }
}

extern "C" __global__ void __launch_bounds__(128, 2) attention_decode_kernel(
    const bf16* __restrict__ q, const bf16* __restrict__ k_cache, const bf16* __restrict__ v_cache,
    const int* __restrict__ block_tables, const int* __restrict__ positions,
    const int* __restrict__ state_slots, const int* __restrict__ work_items,
    const int* __restrict__ first_items, float* __restrict__ partial_out,
    float* __restrict__ partial_stats, int B, int NQ, int NKV, int block_size, int max_blocks) {
    wait_for_earlier_kernels();
    __shared__ float stats[2][WARPS][HEADS];
    __shared__ float merged[WARPS][HEADS][D];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int heads = NQ / NKV, total = first_items[B] * NKV;
    for (int index = blockIdx.x; index < total; index += gridDim.x) {
        const int item = index / NKV, kv_head = index % NKV;
        const int row = work_items[item] / MAX_SPLITS, split = work_items[item] % MAX_SPLITS;
        const int context = positions[row] + 1, length = split_length(context);
        const int end = min((split + 1) * length, context);
        const int* table = block_tables + static_cast<long long>(state_slots[row]) * max_blocks;
        const int first_head = kv_head * heads;

        uint4 query[CHUNKS];
        const bf16* q_row = q + (static_cast<long long>(row) * NQ + first_head + g) * D + t * 8;
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            query[c] = g < heads ? *reinterpret_cast<const uint4*>(q_row + c * 32)
                                 : make_uint4(0, 0, 0, 0);
        }
        WarpState state = {};
        state.largest[0] = state.largest[1] = -INF;
        for (int token = split * length + warp * GROUP; token < end; token += WARPS * GROUP) {
            const long long block = table[token / block_size];
            const long long at =
                ((block * NKV + kv_head) * block_size + token % block_size) * D;
            attend_group(state, query, k_cache + at, v_cache + at, min(end - token, GROUP), g, t);
        }

        // The warps' parts, brought to one maximum and added in the order of the warps.
#pragma unroll
        for (int i = 0; i < 2; ++i) state.sum[i] = sum_over_tokens(state.sum[i]);
        if (g == 0) {
            stats[0][warp][2 * t] = state.largest[0];
            stats[0][warp][2 * t + 1] = state.largest[1];
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int head = 2 * t + i;
            float largest = stats[0][0][head];
#pragma unroll
            for (int w = 1; w < WARPS; ++w) largest = fmaxf(largest, stats[0][w][head]);
            const float factor = exp2f(state.largest[i] - largest);
            if (g == 0) stats[1][warp][head] = state.sum[i] * factor;
#pragma unroll
            for (int tile = 0; tile < SPANS * 4; ++tile) {
                const int dim = tile / 4 * 64 + g * 8 + tile % 4 * 2;
                merged[warp][head][dim] = state.o[tile][i] * factor;
                merged[warp][head][dim + 1] = state.o[tile][i + 2] * factor;
            }
        }
        __syncthreads();
        const long long out_head = static_cast<long long>(item) * NQ + first_head;
        for (int i = threadIdx.x; i < heads * D; i += blockDim.x) {
            float sum = merged[0][i / D][i % D];
#pragma unroll
            for (int w = 1; w < WARPS; ++w) sum += merged[w][i / D][i % D];
            partial_out[out_head * D + i] = sum;
        }
        if (static_cast<int>(threadIdx.x) < heads) {
            float largest = stats[0][0][threadIdx.x], sum = stats[1][0][threadIdx.x];
#pragma unroll
            for (int w = 1; w < WARPS; ++w) {
                largest = fmaxf(largest, stats[0][w][threadIdx.x]);
                sum += stats[1][w][threadIdx.x];
            }
            partial_stats[(out_head + threadIdx.x) * 2] = largest;
            partial_stats[(out_head + threadIdx.x) * 2 + 1] = sum;
        }
        __syncthreads();
    }
}

extern "C" __global__ void __launch_bounds__(64) attention_combine_kernel(
    const float* __restrict__ partial_out, const float* __restrict__ partial_stats,
    const int* __restrict__ first_items, const bf16* __restrict__ qgkv, bf16* __restrict__ out,
    int NQ, int NKV) {
    wait_for_earlier_kernels();
    const int head = blockIdx.x, row = blockIdx.y, dim = threadIdx.x * 4;
    const int begin = first_items[row], end = first_items[row + 1];
    float largest = -INF;
    for (int i = begin; i < end; ++i) {
        largest = fmaxf(largest, partial_stats[(static_cast<long long>(i) * NQ + head) * 2]);
    }
    float values[4] = {}, total = 0.0f;
    for (int i = begin; i < end; ++i) {
        const long long at = static_cast<long long>(i) * NQ + head;
        const float factor = exp2f(partial_stats[at * 2] - largest);
        const float4 part = *reinterpret_cast<const float4*>(partial_out + at * D + dim);
        total += partial_stats[at * 2 + 1] * factor;
        values[0] += part.x * factor;
        values[1] += part.y * factor;
        values[2] += part.z * factor;
        values[3] += part.w * factor;
    }
    float gate[4];
    const long long gate_head = static_cast<long long>(row) * (2 * NQ + 2 * NKV) + NQ + head;
    load_floats(qgkv + gate_head * D + dim, gate);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float attended = end > begin ? round_act(values[i] / total) : 0.0f;
        values[i] = attended * round_act(sigmoid(gate[i]));
    }
    store_act(values, out + (static_cast<long long>(row) * NQ + head) * D + dim);
}
