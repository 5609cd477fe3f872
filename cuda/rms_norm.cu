// rms_norm:              out = x / sqrt(mean(x^2) + eps) * (1 + weight)  >act
// add_rms_norm:          residual = residual + branch  >act;  out = rms_norm(residual)
// add_rms_norm_partials: branch = partials[0] + partials[1] + ... in that order  >act; then so
//
// All act [rows, H], partials fp32 [S, rows, H], S at most 4; H a multiple of 8, at most 8192. fp32
// inside. One block a row, one thread for 8 columns: blockDim.x = H / 8 rounded up to whole warps.
// All time is latency: weights come in before earlier kernels end, everything else is asked for at
// once.
// Formula: spec section 3.0. Check: tools/gpu_check.py --only norm. Time: tools/bench_ops.py
#include "common.cuh"

constexpr int COLUMNS = 8;
constexpr int MAX_SEGMENTS = 4;

// x and the weights of this thread's columns (zeros where `inside` is false) -> out.
__device__ inline void norm_row(float (&x)[COLUMNS], const float (&weight)[COLUMNS], bool inside,
                                float eps, bf16* out, int H) {
    __shared__ float scratch[WARP];
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) squares += x[i] * x[i];
    const float scale = 1.0f / sqrtf(block_sum(squares, scratch) / H + eps);
    if (!inside) return;
#pragma unroll
    for (int i = 0; i < COLUMNS; ++i) x[i] = x[i] * scale * (1.0f + weight[i]);
    store_act(x, out);
}

extern "C" __global__ void __launch_bounds__(1024)
    rms_norm_kernel(const bf16* __restrict__ x, const bf16* __restrict__ weight, float eps,
                    bf16* __restrict__ out, int H) {
    const int column = threadIdx.x * COLUMNS;
    const bool inside = column < H;
    let_next_kernel_start();
    float w[COLUMNS] = {};
    if (inside) load_floats(weight + column, w);
    wait_for_earlier_kernels();
    const long long at = static_cast<long long>(blockIdx.x) * H + column;
    float values[COLUMNS] = {};
    if (inside) load_floats(x + at, values);
    norm_row(values, w, inside, eps, out + at, H);
}

extern "C" __global__ void __launch_bounds__(1024)
    add_rms_norm_kernel(const bf16* __restrict__ branch, bf16* __restrict__ residual,
                        const bf16* __restrict__ weight, float eps, bf16* __restrict__ out, int H) {
    const int column = threadIdx.x * COLUMNS;
    const bool inside = column < H;
    let_next_kernel_start();
    float w[COLUMNS] = {};
    if (inside) load_floats(weight + column, w);
    wait_for_earlier_kernels();
    const long long at = static_cast<long long>(blockIdx.x) * H + column;
    float sum[COLUMNS] = {};
    if (inside) {
        float added[COLUMNS];
        load_floats(residual + at, sum);
        load_floats(branch + at, added);
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) sum[i] = round_act(sum[i] + added[i]);
        store_act(sum, residual + at);
    }
    norm_row(sum, w, inside, eps, out + at, H);
}

extern "C" __global__ void __launch_bounds__(1024)
    add_rms_norm_partials_kernel(const float* __restrict__ partials, bf16* __restrict__ residual,
                                 const bf16* __restrict__ weight, float eps, bf16* __restrict__ out,
                                 int H, int S) {
    const int column = threadIdx.x * COLUMNS;
    const bool inside = column < H;
    let_next_kernel_start();
    float w[COLUMNS] = {};
    if (inside) load_floats(weight + column, w);
    wait_for_earlier_kernels();
    const long long at = static_cast<long long>(blockIdx.x) * H + column;
    const long long segment = static_cast<long long>(gridDim.x) * H;
    float sum[COLUMNS] = {};
    if (inside) {
        load_floats(residual + at, sum);
        float4 parts[MAX_SEGMENTS][2];
#pragma unroll
        for (int s = 0; s < MAX_SEGMENTS; ++s) {
            const float4* part = reinterpret_cast<const float4*>(partials + s * segment + at);
            if (s < S) parts[s][0] = part[0], parts[s][1] = part[1];
        }
        float added[COLUMNS] = {};
#pragma unroll
        for (int s = 0; s < MAX_SEGMENTS; ++s) {
            const float4 low = parts[s][0], high = parts[s][1];
            const float values[COLUMNS] = {low.x,  low.y,  low.z,  low.w,
                                           high.x, high.y, high.z, high.w};
#pragma unroll
            for (int i = 0; i < COLUMNS; ++i) {
                if (s < S) added[i] = s ? added[i] + values[i] : values[i];
            }
        }
#pragma unroll
        for (int i = 0; i < COLUMNS; ++i) sum[i] = round_act(sum[i] + round_act(added[i]));
        store_act(sum, residual + at);
    }
    norm_row(sum, w, inside, eps, out + at, H);
}
