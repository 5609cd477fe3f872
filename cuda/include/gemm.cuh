// What the GEMM kernels of cuda/ share: what they store, to the bit as triton_aot/kernels/gemm.py.
#pragma once

#include "common.cuh"
#include "tensor_core.cuh"

// BF16: the sums, rounded. FP32: not rounded. SILU_MUL: of gate and up rows, see `silu_mul`.
enum class Form { BF16, FP32, SILU_MUL };

__device__ inline float silu_of_act(float gate) {
#ifdef CUDA_ON_CPU
    return gate / (1.0f + expf(-gate));
#else
    float power, ratio;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(-gate * 1.4426950408889634f));
    asm("div.full.f32 %0, %1, %2;" : "=f"(ratio) : "f"(gate), "f"(1.0f + power));
    return ratio;
#endif
}

// silu(gate >act) (>act) * (up >act)  >act
__device__ inline bf16 silu_mul(float gate, float up) {
    return to_act(round_act(silu_of_act(round_act(gate))) * round_act(up));
}

// The same of two columns, side by side: a conversion rounds both.
__device__ inline unsigned silu_mul(float2 gate, float2 up) {
    const auto rounded = [](float2 x) {
        const __nv_bfloat162 pair = __floats2bfloat162_rn(x.x, x.y);
        return make_float2(to_float(pair.x), to_float(pair.y));
    };
    gate = rounded(gate);
    up = rounded(up);
    const float2 silu = rounded(make_float2(silu_of_act(gate.x), silu_of_act(gate.y)));
    return pack_act(silu.x * up.x, silu.y * up.y);
}
