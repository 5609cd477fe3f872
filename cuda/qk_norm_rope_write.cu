// Norm of q and k per head, partial rotation, and the write of k and v to the cache.
//
//     qgkv   act [T, (2 NQ + 2 NKV) * 256]   q heads | gate heads | k heads | v heads
//     q, k:  x = rms_norm(x; (1 + w))  >act;  then for i < 32, angle = position * inv_freq[i]:
//            x'[i] = x[i] c - x[i+32] s,  x'[i+32] = x[i+32] c + x[i] s
//            (c, s, each product and the sum >act); dims 64 .. 255 stay
//     q_out act [T, NQ, 256]; k and raw v go to cache[block, head, offset], act
//            [blocks, NKV, block_size, 256], slot_mapping = block * block_size + offset
//
// A slot below 0 is a padding row: nothing is written to the cache. One warp a (token, head), 8
// dims a lane; grid (ceil((NQ + 2 NKV) / warps), T). Formula: spec sections 1.3 and 3.4.
// Check: tools/gpu_check.py --only rope. Time: tools/bench_ops.py
#include "common.cuh"

constexpr int D = 256;
constexpr int R = 64;
constexpr int DIMS = D / WARP;                 // dims a lane
constexpr int PARTNER = (R / 2) / DIMS;        // lanes between i and i + R/2
constexpr double ONE_OVER_PI = 0.31830988618379067154;

// cos and sin of an fp32 angle of any size: the whole turns are taken off in fp64, because fp32's
// own reduction of large arguments goes through local memory.
__device__ inline void cos_sin(float angle, float& cosine, float& sine) {
    const double half_turns = static_cast<double>(angle) * ONE_OVER_PI;
    const double rest = half_turns - 2.0 * rint(half_turns * 0.5);
    sincospif(static_cast<float>(rest), &sine, &cosine);
}

extern "C" __global__ void __launch_bounds__(128) qk_norm_rope_write_kernel(
    const bf16* __restrict__ qgkv, const bf16* __restrict__ q_norm, const bf16* __restrict__ k_norm,
    float eps, const float* __restrict__ inv_freq, const int* __restrict__ positions,
    const int* __restrict__ slot_mapping, bf16* __restrict__ q_out, bf16* __restrict__ k_cache,
    bf16* __restrict__ v_cache, int NQ, int NKV, int block_size) {
    const int head = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    const int lane = threadIdx.x % WARP, t = blockIdx.y;
    const bool is_q = head < NQ, is_v = head >= NQ + NKV;

    // Before the wait: weights, and one angle a lane, of a position that was uploaded before the step.
    static_assert(R / 2 == WARP);
    float w[DIMS], cosine = 0.0f, sine = 0.0f;
    if (!is_v) {
        cos_sin(static_cast<float>(positions[t]) * inv_freq[lane], cosine, sine);
        load_floats((is_q ? q_norm : k_norm) + lane * DIMS, w);
    }
    cosine = round_act(cosine);
    sine = round_act(sine);

    wait_for_earlier_kernels();
    if (head >= NQ + 2 * NKV) return;
    const int source = is_q ? head : head + NQ;  // the gate heads lie between
    const bf16* from = qgkv + (static_cast<long long>(t) * (2 * NQ + 2 * NKV) + source) * D;

    bf16* to = q_out + (static_cast<long long>(t) * NQ + head) * D;
    if (!is_q) {
        const int slot = slot_mapping[t];
        if (slot < 0) return;
        const int kv_head = head - NQ - (is_v ? NKV : 0);
        const long long row =
            (static_cast<long long>(slot / block_size) * NKV + kv_head) * block_size +
            slot % block_size;
        to = (is_v ? v_cache : k_cache) + row * D;
    }
    from += lane * DIMS;
    to += lane * DIMS;
    if (is_v) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
        return;
    }

    float x[DIMS];
    load_floats(from, x);
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < DIMS; ++i) squares += x[i] * x[i];
    const float scale = 1.0f / sqrtf(warp_sum(squares) / D + eps);
#pragma unroll
    for (int i = 0; i < DIMS; ++i) x[i] = round_act(x[i] * scale * (1.0f + w[i]));

    const bool rotated = lane < R / DIMS;
    const float sign = lane < PARTNER ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < DIMS; ++i) {
        const float partner = __shfl_xor_sync(ALL_LANES, x[i], PARTNER);
        const int angle = (lane % PARTNER) * DIMS + i;
        const float along = round_act(x[i] * __shfl_sync(ALL_LANES, cosine, angle));
        const float across = round_act(partner * __shfl_sync(ALL_LANES, sine, angle));
        if (rotated) x[i] = along + sign * across;
    }
    store_act(x, to);
}
