// gated_rms_norm: out = ((x / sqrt(mean(x^2) + eps) >act) * weight >act) * silu(z) >act, per head
// of 128.
//
// x, out act [T, HV * 128], out may be x; z: columns C .. C + HV * 128 of qkvzba (see
// delta_net.cuh); weight fp32 [128], plain. One warp a (token, head), 4 dims a lane; grid
// (ceil(HV / warps), T).
// Formula: spec section 3.0. Check: tools/gpu_check.py --only gated_norm. Time: tools/bench_ops.py
#include "delta_net.cuh"

extern "C" __global__ void __launch_bounds__(128) gated_rms_norm_kernel(
    const bf16* x, const bf16* __restrict__ qkvzba, const float* __restrict__ weight,
    float eps, bf16* out, int HK, int HV) {
    wait_for_earlier_kernels();
    const int head = blockIdx.x * (blockDim.x / WARP) + threadIdx.x / WARP;
    if (head >= HV) return;
    const int at = head * HEAD + (threadIdx.x % WARP) * 4;
    const long long t = blockIdx.y;
    const float4 w = *reinterpret_cast<const float4*>(weight + (threadIdx.x % WARP) * 4);
    const float weights[4] = {w.x, w.y, w.z, w.w};
    float values[4], z[4];
    load_floats(x + t * HV * HEAD + at, values);
    load_floats(qkvzba + t * projection_size(HK, HV) + conv_channels(HK, HV) + at, z);
    gated_norm(values, weights, z, eps);
    store_act(values, out + t * HV * HEAD + at);
}
