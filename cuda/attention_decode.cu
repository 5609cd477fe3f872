// Paged attention of one query row a sequence, in splits of the context: softmax(q k^T / 16) v of each
// split, which attention_combine.cu makes into the rows' results.
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
// Which dim plays which k (or m) index of an instruction is ours to choose, as long as Q (or the
// store) uses the same choice. A lane's 8 consecutive dims of K are k = 2t, 2t+1, 2t+8, 2t+9 of two
// instructions; its 8 consecutive dims of V are m = g and g + 8 of four. So a lane uses exactly the
// 16-byte pieces that it copied itself, and its copies need no barrier.
//
// Each warp has room for one K or V of a group, in quarters. A quarter is consumed and then refilled
// with the quarter of what comes next: K, V, K of the next group, ..., across work items. What an
// item needs besides (its row, its query) is loaded while the item before it is worked on.
//
// Formula: spec section 3.4. Check: tools/gpu_check.py --only attention_decode.
// Time: tools/bench_ops.py
#include "async_copy.cuh"
#include "decode_splits.cuh"
#include "tensor_core.cuh"

constexpr int D = 256;
constexpr int WARPS = 4;
constexpr int GROUP = 16;            // tokens of a warp's step
constexpr int HEADS = 8;             // columns: query heads of a KV head, padded
constexpr int QUARTERS = 4;          // of a group's K or V
constexpr int PIECES = 4;            // 16-byte pieces of a quarter that a lane moves
constexpr int QUARTER_DIMS = D / QUARTERS;
constexpr int MERGE_ROW = QUARTER_DIMS + 2;  // floats; + 2 spreads the heads over the banks
constexpr float SCALE = 1.4426950408889634f / 16.0f;  // log2(e) / sqrt(D)

struct WarpState {
    float o[QUARTERS * 4][4];
    float largest[2];  // of heads 2t, 2t + 1
    float sum[2];      // this lane's tokens only
};

// One split of a row, for one KV head.
struct Item {
    int row, kv_head, begin, end;  // positions
    const int* table;
};

// Where a group lies in the caches, in elements, and how many tokens it has: none if count <= 0.
struct Group {
    long long at;
    int count;
};

struct Cache {
    const bf16 *k, *v;
    int NKV, block_size;

    __device__ Group group(const Item& item, int token) const {
        const int count = min(item.end - token, GROUP);
        if (count <= 0) return {0, 0};
        const long long block = item.table[token / block_size];
        return {((block * NKV + item.kv_head) * block_size + token % block_size) * D, count};
    }
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

using Quarter = uint4[PIECES][WARP];

__device__ inline void copy_piece(uint4& to, const bf16* from) {
    copy_async_16(reinterpret_cast<bf16*>(&to), from);
}

// Rows that a group does not have are not read: its last one is copied again, with weight 0.
__device__ inline void copy_k(Quarter& to, const bf16* cache, const Group& group, int quarter,
                              int lane) {
    const int g = lane / 4, t = lane % 4;
    if (group.count > 0) {
#pragma unroll
        for (int i = 0; i < PIECES; ++i) {
            const int token = min(g + i % 2 * 8, group.count - 1);
            const int dim = quarter * QUARTER_DIMS + i / 2 * 32 + t * 8;
            copy_piece(to[i][lane], cache + group.at + token * D + dim);
        }
    }
    end_copy_group();
}

__device__ inline void copy_v(Quarter& to, const bf16* cache, const Group& group, int quarter,
                              int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
        const int token = min(2 * t + i % 2 + i / 2 * 8, group.count - 1);
        copy_piece(to[i][lane], cache + group.at + token * D + quarter * QUARTER_DIMS + g * 8);
    }
    end_copy_group();
}

__device__ inline void copy_all_k(Quarter (&ring)[QUARTERS], const bf16* cache, const Group& group,
                                  int lane) {
#pragma unroll
    for (int i = 0; i < QUARTERS; ++i) copy_k(ring[i], cache, group, i, lane);
}

// One group, whose K is on its way; leaves that of the group `ahead` on its way.
__device__ inline void attend_group(WarpState& state, Quarter (&ring)[QUARTERS],
                                    const uint4 (&query)[2 * QUARTERS][WARP], const Cache& cache,
                                    const Group& group, const Group& ahead, int lane) {
    const int g = lane / 4;
    float s[4] = {};
#pragma unroll
    for (int quarter = 0; quarter < QUARTERS; ++quarter) {
        wait_copy_groups<QUARTERS - 1>();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint4 low = ring[quarter][2 * i][lane], high = ring[quarter][2 * i + 1][lane];
            const uint4 q = query[2 * quarter + i][lane];
            mma_bf16(s, low.x, high.x, low.y, high.y, q.x, q.y);
            mma_bf16(s, low.z, high.z, low.w, high.w, q.z, q.w);
        }
        copy_v(ring[quarter], cache.v, group, quarter, lane);
    }
    float correction[2], p[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = g + i / 2 * 8 < group.count ? s[i] * SCALE : -INF;
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
    for (int quarter = 0; quarter < QUARTERS; ++quarter) {
        wait_copy_groups<QUARTERS - 1>();
        uint4 rows[PIECES];  // tokens 2t, 2t+1, 2t+8, 2t+9
#pragma unroll
        for (int i = 0; i < PIECES; ++i) rows[i] = ring[quarter][i][lane];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            float (&o)[4] = state.o[quarter * 4 + j];
#pragma unroll
            for (int i = 0; i < 4; ++i) o[i] *= correction[i % 2];
            const unsigned r0 = (&rows[0].x)[j], r1 = (&rows[1].x)[j];
            const unsigned r2 = (&rows[2].x)[j], r3 = (&rows[3].x)[j];
            mma_bf16(o, lower_halves(r0, r1), upper_halves(r0, r1), lower_halves(r2, r3),
                     upper_halves(r2, r3), b0, b1);
        }
        copy_k(ring[quarter], cache.k, ahead, quarter, lane);
    }
}

extern "C" __global__ void __launch_bounds__(128, 3) attention_decode_kernel(
    const bf16* __restrict__ q, const bf16* __restrict__ k_cache, const bf16* __restrict__ v_cache,
    const int* __restrict__ block_tables, const int* __restrict__ positions,
    const int* __restrict__ state_slots, const int* __restrict__ work_items,
    const int* __restrict__ first_items, float* __restrict__ partial_out,
    float* __restrict__ partial_stats, int B, int NQ, int NKV, int block_size, int max_blocks) {
    __shared__ Quarter rings[WARPS][QUARTERS];
    __shared__ uint4 query[2 * QUARTERS][WARP];
    __shared__ __align__(16) float merged[WARPS][HEADS][MERGE_ROW];
    __shared__ float stats[2][WARPS][HEADS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, g = lane / 4, t = lane % 4;
    const int heads = NQ / NKV, total = first_items[B] * NKV, step = gridDim.x;
    const Cache cache = {k_cache, v_cache, NKV, block_size};
    const auto work_item = [=](int index) { return index < total ? work_items[index / NKV] : -1; };
    const auto item_of = [=](int work, int index) {
        const int row = work / MAX_SPLITS, split = work % MAX_SPLITS, context = positions[row] + 1;
        const int length = split_length(context);
        const int* table = block_tables + static_cast<long long>(state_slots[row]) * max_blocks;
        return Item{row, index % NKV, split * length, min((split + 1) * length, context), table};
    };
    const auto first_group = [=](const Item& item) {
        return cache.group(item, item.begin + warp * GROUP);
    };
    // Pieces 2 * warp and 2 * warp + 1 of every lane's query.
    const auto load_query = [=](const Item& item, uint4 (&to)[2]) {
        const bf16* from =
            q + (static_cast<long long>(item.row) * NQ + item.kv_head * heads + g) * D + t * 8;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            to[i] = g < heads ? *reinterpret_cast<const uint4*>(from + (2 * warp + i) * 32)
                              : make_uint4(0, 0, 0, 0);
        }
    };

    // Before the wait, what prepare_decode and earlier steps wrote: the work list, and all keys but
    // those of the step.
    int index = blockIdx.x;
    const int work = work_item(index);
    Item item = {};
    Group group = {};
    if (work >= 0) {
        item = item_of(work, index);
        group = first_group(item);
    }
    const bool newest = item.begin + warp * GROUP + group.count > positions[item.row];
    if (!newest) copy_all_k(rings[warp], k_cache, group, lane);
    wait_for_earlier_kernels();
    if (work < 0) return;
    if (newest) copy_all_k(rings[warp], k_cache, group, lane);
    int next_work = work_item(index + step);
    uint4 next_query[2];
    load_query(item, next_query);
#pragma unroll
    for (int i = 0; i < 2; ++i) query[2 * warp + i][lane] = next_query[i];
    __syncthreads();

    while (true) {
        Item next = {};  // stays empty after the last one: none of its groups has tokens
        const bool more = next_work >= 0;
        if (more) {
            next = item_of(next_work, index + step);
            load_query(next, next_query);
            next_work = work_item(index + 2 * step);
        }
        WarpState state = {};
        state.largest[0] = state.largest[1] = -INF;
        int token = item.begin + warp * GROUP;
        if (token >= item.end) {
            group = first_group(next);
            copy_all_k(rings[warp], k_cache, group, lane);
        }
        for (; token < item.end; token += WARPS * GROUP) {
            Group ahead = cache.group(item, token + WARPS * GROUP);
            if (ahead.count <= 0) ahead = first_group(next);
            attend_group(state, rings[warp], query, cache, group, ahead, lane);
            group = ahead;
        }

        // The warps' parts, brought to one maximum and added in the order of the warps.
#pragma unroll
        for (int i = 0; i < 2; ++i) state.sum[i] = sum_over_tokens(state.sum[i]);
        if (g == 0) {
            stats[0][warp][2 * t] = state.largest[0];
            stats[0][warp][2 * t + 1] = state.largest[1];
        }
        __syncthreads();
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int head = 2 * t + i;
            float largest = stats[0][0][head];
#pragma unroll
            for (int w = 1; w < WARPS; ++w) largest = fmaxf(largest, stats[0][w][head]);
            factor[i] = exp2f(state.largest[i] - largest);
            if (g == 0) stats[1][warp][head] = state.sum[i] * factor[i];
            query[2 * warp + i][lane] = next_query[i];
        }
        const long long out_head =
            static_cast<long long>(index / NKV) * NQ + item.kv_head * heads;
#pragma unroll
        for (int quarter = 0; quarter < QUARTERS; ++quarter) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (2 * t + i < heads) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const float (&o)[4] = state.o[quarter * 4 + j];
                        *reinterpret_cast<float2*>(&merged[warp][2 * t + i][g * 8 + j * 2]) =
                            make_float2(o[i] * factor[i], o[i + 2] * factor[i]);
                    }
                }
            }
            __syncthreads();
            for (int i = threadIdx.x; i < heads * QUARTER_DIMS; i += WARPS * WARP) {
                const int head = i / QUARTER_DIMS, dim = i % QUARTER_DIMS;
                float sum = merged[0][head][dim];
#pragma unroll
                for (int w = 1; w < WARPS; ++w) sum += merged[w][head][dim];
                partial_out[(out_head + head) * D + quarter * QUARTER_DIMS + dim] = sum;
            }
            if (quarter == 0 && static_cast<int>(threadIdx.x) < heads) {
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
        if (!more) break;
        item = next;
        index += step;
    }
}
