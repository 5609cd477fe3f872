// What the GEMM kernels of cuda/ share: what they store, to the bit as triton_aot/kernels/gemm.py.
#pragma once

#include "common.cuh"

// BF16: the sums, rounded. FP32: not rounded. SILU_MUL: of gate and up rows, see `silu_mul`.
enum class Form { BF16, FP32, SILU_MUL };

// silu(gate >act) (>act) * (up >act)  >act
__device__ inline bf16 silu_mul(float gate, float up) {
    gate = round_act(gate);
    up = round_act(up);
#ifdef CUDA_ON_CPU
    const float ratio = gate / (1.0f + expf(-gate));
#else
    float power, ratio;
    asm("ex2.approx.f32 %0, %1;" : "=f"(power) : "f"(-gate * 1.4426950408889634f));
    asm("div.full.f32 %0, %1, %2;" : "=f"(ratio) : "f"(gate), "f"(1.0f + power));
#endif
    return to_act(round_act(ratio) * up);
}
