// Paged attention of one query row a sequence, in splits of the context: softmax(q k^T / 16) v of each
// split, which attention_combine.cu makes into the rows' results.
//
//     q act [B, NQ, 256]; query head j reads KV head j / (NQ / NKV), at most 8 query heads each
//     k_cache, v_cache act [blocks, NKV, block_size, 256]; block_size a multiple of 16
//     work_items, first_items: from prepare_decode. partial_out fp32 [items, NQ, 256] (not yet
//     divided by the sum of weights), partial_stats fp32 [items, NQ, 2]: maximum (of the score
//     times log2 e) and sum of weights
//
// Grid: any, persistent over (work item, KV head). A block's 4 warps take the 16-token groups of the
// split in turn. Tokens are the rows of the tensor core's left operand and the query heads of one KV
// head its 8 columns:
//
//     S [16 tokens, 8 heads]  = K [16 tokens, 256] Q^T
//     O [256 dims, 8 heads]  += V^T [256 dims, 16 tokens] P
//
// Which dim plays which k (or m) index of an instruction is ours to choose, as long as Q (or the
// store) uses the same choice. A lane's 8 consecutive dims of K are k = 2t, 2t+1, 2t+8, 2t+9 of two
// instructions; its 8 consecutive dims of V are m = g and g + 8 of four.
//
// Memory never waits for an item's end: the ring of each warp (kv_ring.cuh) goes on across items, and
// what else an item needs is loaded while the one before is worked on. At the end of an item a warp
// leaves its part of the result in the slot that it has just used, before it refills that slot.
//
// Formula: spec section 3.4. Check: tools/gpu_check.py --only attention_decode.
// Time: tools/bench_ops.py
#include "kv_ring.cuh"
#include "tensor_core.cuh"

constexpr int HEADS = 8;  // columns: query heads of a KV head, padded
constexpr int QUARTERS = 4;  // of the dims, 8 chunks each
constexpr float SCALE = 1.4426950408889634f / 16.0f;  // log2(e) / sqrt(D)
static_assert(sizeof(Slot) >= HEADS * D * sizeof(float));  // a warp's part of the result

struct WarpState {
    float o[QUARTERS * 4][4];
    float largest[2];  // of heads 2t, 2t + 1
    float sum[2];      // this lane's tokens only
};

// What the warps of a block tell each other at the end of an item.
struct Parts {
    float largest[WARPS][HEADS], sum[WARPS][HEADS];
    int slot[WARPS];  // of the warp's ring, where its part lies
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

// S of a group from its K.
__device__ inline void scores(float (&s)[4], Slot& keys, const uint4 (&query)[2 * QUARTERS][WARP],
                              int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int i = 0; i < 2 * QUARTERS; ++i) {
        const uint4 low = keys.key(g, i * 4 + t), high = keys.key(g + 8, i * 4 + t);
        const uint4 q = query[i][lane];
        mma_bf16(s, low.x, high.x, low.y, high.y, q.x, q.y);
        mma_bf16(s, low.z, high.z, low.w, high.w, q.z, q.w);
    }
}

// The weights of a group of `count` tokens, as the right operand; brings the state to the new maximum.
__device__ inline void weights(unsigned (&p)[2], float (&s)[4], WarpState& state, int count,
                               int lane) {
    const int g = lane / 4;
    float correction[2], w[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) s[i] = g + i / 2 * 8 < count ? s[i] * SCALE : -INF;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const float largest = fmaxf(state.largest[i], max_over_tokens(fmaxf(s[i], s[i + 2])));
        correction[i] = exp2f(state.largest[i] - largest);
        w[i] = exp2f(s[i] - largest);
        w[i + 2] = exp2f(s[i + 2] - largest);
        state.sum[i] = state.sum[i] * correction[i] + (w[i] + w[i + 2]);
        state.largest[i] = largest;
    }
    p[0] = transpose_8x8(pack_act(w[0], w[1]));
    p[1] = transpose_8x8(pack_act(w[2], w[3]));
#pragma unroll
    for (int j = 0; j < QUARTERS * 4; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) state.o[j][i] *= correction[i % 2];
    }
}

// O += V^T P of a group.
__device__ inline void add_values(WarpState& state, Slot& values, const unsigned (&p)[2],
                                  int lane) {
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int quarter = 0; quarter < QUARTERS; ++quarter) {
        uint4 rows[4];  // tokens 2t, 2t+1, 2t+8, 2t+9
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            rows[i] = values.value(2 * t + i % 2 + i / 2 * 8, quarter * 8 + g);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const unsigned r0 = (&rows[0].x)[j], r1 = (&rows[1].x)[j];
            const unsigned r2 = (&rows[2].x)[j], r3 = (&rows[3].x)[j];
            mma_bf16(state.o[quarter * 4 + j], lower_halves(r0, r1), upper_halves(r0, r1),
                     lower_halves(r2, r3), upper_halves(r2, r3), p[0], p[1]);
        }
    }
}

// Four dims of a head of a warp's part: the chunks of the heads that a phase of a store writes lie
// in different banks.
__device__ inline float4& part_chunk(Slot& slot, int head, int i) {
    const int swizzle = (head >> 1 & 1) | (head >> 2 & 1) * 4;
    return reinterpret_cast<float4*>(slot.at)[head * (D / 4) + (i ^ swizzle)];
}

// Leaves a warp's part in the slot that it has used last.
__device__ inline void write_part(Parts& parts, const Ring& ring, const WarpState& state,
                                  int heads, int warp, int lane) {
    const int g = lane / 4, t = lane % 4;
    Slot& slot = ring.slots[ring.current];
    if (lane == 0) parts.slot[warp] = ring.current;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const int head = 2 * t + i;
        const float sum = sum_over_tokens(state.sum[i]);
        if (g == 0) {
            parts.largest[warp][head] = state.largest[i];
            parts.sum[warp][head] = sum;
        }
        if (head >= heads) continue;
#pragma unroll
        for (int j = 0; j < 2 * QUARTERS; ++j) {
            const float (&low)[4] = state.o[2 * j], (&high)[4] = state.o[2 * j + 1];
            part_chunk(slot, head, j / 2 * 16 + g * 2 + j % 2) =
                make_float4(low[i], low[i + 2], high[i], high[i + 2]);
        }
    }
}

// Adds the parts of the first `active` warps, in order; a warp a head.
__device__ inline void add_parts(const Parts& parts, Slot* slots, int active,
                                 float* __restrict__ out, float* __restrict__ stats, int heads,
                                 int warp, int lane) {
    for (int head = warp; head < heads; head += WARPS) {
        float largest = parts.largest[0][head], sum = 0.0f;
        for (int w = 1; w < active; ++w) largest = fmaxf(largest, parts.largest[w][head]);
        float total[2][4] = {};
#pragma unroll
        for (int w = 0; w < WARPS; ++w) {
            if (w >= active) break;
            const float factor = exp2f(parts.largest[w][head] - largest);
            sum += parts.sum[w][head] * factor;
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float4 part =
                    part_chunk(slots[w * SLOTS + parts.slot[w]], head, half * WARP + lane);
                total[half][0] += part.x * factor;
                total[half][1] += part.y * factor;
                total[half][2] += part.z * factor;
                total[half][3] += part.w * factor;
            }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float (&x)[4] = total[half];
            reinterpret_cast<float4*>(out + static_cast<long long>(head) * D)[half * WARP + lane] =
                make_float4(x[0], x[1], x[2], x[3]);
        }
        if (lane == 0) {
            stats[head * 2] = largest;
            stats[head * 2 + 1] = sum;
        }
    }
}

// Pieces 2 * warp and 2 * warp + 1 of every lane's query.
__device__ inline void load_query(uint4 (&to)[2], const bf16* q, const Item& item, int NQ,
                                  int heads, int warp, int lane) {
    const int g = lane / 4, t = lane % 4;
    const bf16* from =
        q + (static_cast<long long>(item.row) * NQ + item.kv_head * heads + g) * D + t * 8;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        to[i] = g < heads ? *reinterpret_cast<const uint4*>(from + (2 * warp + i) * 32)
                          : make_uint4(0, 0, 0, 0);
    }
}

extern "C" __global__ void __launch_bounds__(128, 2) attention_decode_kernel(
    const bf16* __restrict__ q, const bf16* __restrict__ k_cache, const bf16* __restrict__ v_cache,
    const int* __restrict__ block_tables, const int* __restrict__ work_items,
    const int* __restrict__ first_items, float* __restrict__ partial_out,
    float* __restrict__ partial_stats, int B, int NQ, int NKV, int block_size, int max_blocks) {
    DYNAMIC_SHARED(Slot, slots);
    __shared__ uint4 query[2 * QUARTERS][WARP];
    __shared__ Parts parts;
    __shared__ Barrier filled[WARPS][SLOTS];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int heads = NQ / NKV, step = gridDim.x;
    const WorkList list = {reinterpret_cast<const WorkItem*>(work_items), first_items[B], NKV};
    const PagedCache cache = {k_cache, v_cache, block_tables, NKV, block_size, max_blocks};

    // Before the wait, what prepare_decode and earlier steps wrote: the work list, and all keys and
    // values but the newest of each row.
    int index = blockIdx.x;
    Item item = list.at(index);
    Loader loader(cache, list, index, step);
    Ring ring(slots + warp * SLOTS, filled[warp]);
    const int early = item.has_newest() ? 0 : 2;  // K and V of the first group
    for (int i = 0; i < early; ++i) ring.refill(loader);
    wait_for_earlier_kernels();
    if (!item.exists()) return;
    for (int i = early; i < SLOTS; ++i) ring.refill(loader);
    uint4 next_query[2];
    load_query(next_query, q, item, NQ, heads, warp, lane);
#pragma unroll
    for (int i = 0; i < 2; ++i) query[2 * warp + i][lane] = next_query[i];
    __syncthreads();

    while (item.exists()) {
        const Item next = list.at(index + step);
        if (next.exists()) load_query(next_query, q, next, NQ, heads, warp, lane);
        WarpState state = {};
        state.largest[0] = state.largest[1] = -INF;
        const int first = item.begin + warp * GROUP;
        for (int token = first; token < item.end; token += STRIDE) {
            if (token > first) ring.refill(loader);
            float s[4] = {};
            unsigned p[2];
            scores(s, ring.wait(), query, lane);
            ring.refill(loader);
            weights(p, s, state, item.end - token, lane);
            add_values(state, ring.wait(), p, lane);
        }
        if (first < item.end) {
            __syncwarp();
            write_part(parts, ring, state, heads, warp, lane);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < 2; ++i) query[2 * warp + i][lane] = next_query[i];
        const long long head = static_cast<long long>(index / NKV) * NQ + item.kv_head * heads;
        add_parts(parts, slots, min((item.end - item.begin + GROUP - 1) / GROUP, WARPS),
                  partial_out + head * D, partial_stats + head * 2, heads, warp, lane);
        __syncthreads();
        if (first < item.end) ring.refill_written(loader);
        item = next;
        index += step;
    }
}
DYNAMIC_SHARED_BYTES(attention_decode, 73728, 110592);
