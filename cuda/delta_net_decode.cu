// delta_net_decode: conv + SiLU + delta rule + gated RMSNorm for one token a row, fused.
//
//     m = silu(conv(x) >act) >act, conv over positions t-3 .. t from the ring;  q, k, v = m
//     qn = q / sqrt(sum q^2 + 1e-6) / sqrt(128),  kn = k / sqrt(sum k^2 + 1e-6)
//     beta = sigmoid(b) >act,  alpha = exp(-exp(a_log) softplus(a + dt_bias))
//     S = alpha S;  u = beta (v - S^T kn);  S = S + kn u^T;  o = S^T qn >act
//     out = gated_rms_norm(o, z)
//
//     qkvzba act [B, projection]; conv_weight act [C, 4]; a_log, dt_bias fp32 [HV];
//     norm_weight fp32 [128]; conv_state act [slots, 4, C];
//     recurrent_state fp32 [slots, HV, 128, 128];
//     out act [B, HV * 128]
//
// One block a (value head n, row). The rep = HV / HK blocks that share key head n / rep all read
// the ring's rows t-1, t-2, t-3; row t % 4, which none of them reads, is written by the first of
// them. Of the state of a head warp w has rows 16 w .. 16 w + 15, a lane 4 columns of each; sums
// over rows go through shared memory in the order of the warps.
// A row whose slot is below 0 is padding and is left alone.
//
// delta_net_decode: the state stays in registers, two blocks a multiprocessor. For few rows.
// delta_net_decode_many: it stays in shared memory, three blocks a multiprocessor, more of which is
// on its way at a time. A thread copies and reads the same elements: no barrier is needed.
// Formula: spec sections 3.5 and 4.1. Check: tools/gpu_check.py --only delta_decode.
// Time: tools/bench_ops.py
#include "async_copy.cuh"
#include "delta_net.cuh"

constexpr int WARPS = 8;
constexpr int ROWS = HEAD / WARPS;  // of S, a warp
constexpr int THREADS = WARPS * WARP;
constexpr float L2_EPS = 1e-6f;
constexpr float INVERSE_ROOT = 0.08838834764831845f;  // 1 / sqrt(128)

// Two neighbouring channels of the convolution. `load` reads nothing of this step.
struct ConvPair {
    float taps[2 * TAPS], past[TAPS - 1][2];  // past[i]: of position - 3 + i

    __device__ void load(const bf16* weight, const bf16* ring, int channel, int C, int position) {
        load_floats(weight + channel * TAPS, taps);
#pragma unroll
        for (int i = 0; i < TAPS - 1; ++i) {
            const int from = position - (TAPS - 1) + i;
            past[i][0] = past[i][1] = 0.0f;
            if (from >= 0) load_floats(ring + (from % CONV_RING) * C + channel, past[i]);
        }
    }

    // The two values after SiLU.
    __device__ float2 apply(const float (&current)[2]) const {
        float sum[2] = {};
#pragma unroll
        for (int c = 0; c < 2; ++c) {
#pragma unroll
            for (int i = 0; i < TAPS - 1; ++i) sum[c] = fmaf(taps[c * TAPS + i], past[i][c], sum[c]);
            sum[c] = fmaf(taps[c * TAPS + TAPS - 1], current[c], sum[c]);
            sum[c] = round_act(silu(round_act(sum[c])));
        }
        return make_float2(sum[0], sum[1]);
    }
};

// 1 / sqrt(sum x^2 + eps) over 128 values in shared memory.
__device__ inline float inverse_norm(const float* x, int lane) {
    const float4 v = reinterpret_cast<const float4*>(x)[lane];
    return 1.0f / sqrtf(warp_sum(v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w) + L2_EPS);
}

__device__ inline void add_scaled(float4& sum, const float4& x, float scale) {
    sum.x = fmaf(x.x, scale, sum.x);
    sum.y = fmaf(x.y, scale, sum.y);
    sum.z = fmaf(x.z, scale, sum.z);
    sum.w = fmaf(x.w, scale, sum.w);
}

// Sum of the warps' parts, in order; the lane's 4 columns.
__device__ inline float4 sum_parts(const float4 (&parts)[WARPS][WARP], int lane) {
    float4 sum = parts[0][lane];
#pragma unroll
    for (int w = 1; w < WARPS; ++w) add_scaled(sum, parts[w][lane], 1.0f);
    return sum;
}

template <bool SHARED>
__device__ inline void decode_item(
    const bf16* __restrict__ qkvzba, const bf16* __restrict__ conv_weight,
    const float* __restrict__ a_log, const float* __restrict__ dt_bias,
    const float* __restrict__ norm_weight, float eps, const int* __restrict__ positions,
    const int* __restrict__ state_slots, bf16* conv_state, float* recurrent_state,
    bf16* __restrict__ out, int HK, int HV, float4* states) {
    __shared__ __align__(16) float qkv[3][HEAD];
    __shared__ float4 reads[WARPS][WARP], outputs[WARPS][WARP];
    const int n = blockIdx.x, row = blockIdx.y;
    const int slot = state_slots[row], position = positions[row];
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int C = conv_channels(HK, HV), rep = HV / HK, key_head = n / rep;
    const bf16* x = qkvzba + static_cast<long long>(row) * projection_size(HK, HV);

    // Everything that no kernel of this step writes, on its way before those before this one end:
    // the state, which is the bulk of the traffic, the ring and the weights.
    const long long head_state = (static_cast<long long>(slot) * HV + n) * HEAD * HEAD;
    float4* state =
        reinterpret_cast<float4*>(recurrent_state + head_state + warp * ROWS * HEAD) + lane;
    const bool has_state = slot >= 0 && position > 0;
    float4 s[SHARED ? 1 : ROWS];
    if (SHARED) {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            if (has_state) {
                copy_async_16(reinterpret_cast<bf16*>(states + i * THREADS + threadIdx.x),
                              reinterpret_cast<const bf16*>(state + i * WARP));
            } else {
                states[i * THREADS + threadIdx.x] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
        }
        end_copy_group();
    } else {
#pragma unroll
        for (int i = 0; i < ROWS; ++i) {
            s[SHARED ? 0 : i] = has_state ? state[i * WARP] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    }
    const int part = threadIdx.x / (HEAD / 2), dim = threadIdx.x % (HEAD / 2) * 2;
    const int head = part == 0 ? key_head : part == 1 ? HK + key_head : 2 * HK + n;
    const int channel = head * HEAD + dim;
    bf16* ring = conv_state + static_cast<long long>(slot) * CONV_RING * C;
    ConvPair conv;
    if (slot >= 0 && part < 3) conv.load(conv_weight, ring, channel, C, position);
    const float decay = expf(a_log[n]), bias = dt_bias[n];
    const float4 norm = reinterpret_cast<const float4*>(norm_weight)[lane];

    wait_for_earlier_kernels();
    if (slot < 0) return;
    if (part < 3) {
        float current[2];
        load_floats(x + channel, current);
        if (part == 2 || n % rep == 0) store_act(current, ring + (position % CONV_RING) * C + channel);
        const float2 pair = conv.apply(current);
        qkv[part][dim] = pair.x;
        qkv[part][dim + 1] = pair.y;
    }
    const float b = to_float(x[C + HV * HEAD + n]), a = to_float(x[C + HV * HEAD + HV + n]);
    const float beta = round_act(sigmoid(b));
    const float alpha = expf(-decay * softplus(a + bias));
    float z[4];
    const int at = n * HEAD + lane * 4;
    load_floats(x + C + at, z);
    __syncthreads();

    const float q_scale = inverse_norm(qkv[0], lane) * INVERSE_ROOT;
    const float k_scale = inverse_norm(qkv[1], lane);
    float4 read = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (SHARED) wait_copy_groups<0>();
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        float4 x = SHARED ? states[i * THREADS + threadIdx.x] : s[SHARED ? 0 : i];
        x = make_float4(x.x * alpha, x.y * alpha, x.z * alpha, x.w * alpha);
        if (!SHARED) s[SHARED ? 0 : i] = x;
        add_scaled(read, x, qkv[1][warp * ROWS + i] * k_scale);
    }
    reads[warp][lane] = read;
    __syncthreads();
    read = sum_parts(reads, lane);
    const float4 v = reinterpret_cast<const float4*>(qkv[2])[lane];
    const float4 u = make_float4(beta * (v.x - read.x), beta * (v.y - read.y),
                                 beta * (v.z - read.z), beta * (v.w - read.w));
    float4 o = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < ROWS; ++i) {
        float4 x = SHARED ? states[i * THREADS + threadIdx.x] : s[SHARED ? 0 : i];
        if (SHARED) x = make_float4(x.x * alpha, x.y * alpha, x.z * alpha, x.w * alpha);
        add_scaled(x, u, qkv[1][warp * ROWS + i] * k_scale);
        state[i * WARP] = x;
        add_scaled(o, x, qkv[0][warp * ROWS + i] * q_scale);
    }
    outputs[warp][lane] = o;
    __syncthreads();
    if (warp > 0) return;

    o = sum_parts(outputs, lane);
    float values[4] = {round_act(o.x), round_act(o.y), round_act(o.z), round_act(o.w)};
    const float weights[4] = {norm.x, norm.y, norm.z, norm.w};
    gated_norm(values, weights, z, eps);
    store_act(values, out + static_cast<long long>(row) * HV * HEAD + at);
}

extern "C" __global__ void __launch_bounds__(THREADS, 2) delta_net_decode_kernel(
    const bf16* __restrict__ qkvzba, const bf16* __restrict__ conv_weight,
    const float* __restrict__ a_log, const float* __restrict__ dt_bias,
    const float* __restrict__ norm_weight, float eps, const int* __restrict__ positions,
    const int* __restrict__ state_slots, bf16* conv_state, float* recurrent_state,
    bf16* __restrict__ out, int HK, int HV) {
    decode_item<false>(qkvzba, conv_weight, a_log, dt_bias, norm_weight, eps, positions,
                       state_slots, conv_state, recurrent_state, out, HK, HV, nullptr);
}

extern "C" __global__ void __launch_bounds__(THREADS, 3) delta_net_decode_many_kernel(
    const bf16* __restrict__ qkvzba, const bf16* __restrict__ conv_weight,
    const float* __restrict__ a_log, const float* __restrict__ dt_bias,
    const float* __restrict__ norm_weight, float eps, const int* __restrict__ positions,
    const int* __restrict__ state_slots, bf16* conv_state, float* recurrent_state,
    bf16* __restrict__ out, int HK, int HV) {
    DYNAMIC_SHARED(float4, states);
    decode_item<true>(qkvzba, conv_weight, a_log, dt_bias, norm_weight, eps, positions,
                       state_slots, conv_state, recurrent_state, out, HK, HV, states);
}
DYNAMIC_SHARED_BYTES(delta_net_decode_many, 65536, 65536);
