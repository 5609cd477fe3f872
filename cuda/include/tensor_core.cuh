// Warp-level bf16 matrix instructions (sm_80 and later) and their register layouts. With
// g = lane / 4 and t = lane % 4, and two bf16 a register, the lower index in the lower half:
//
//     A [16 m, 16 k]   a0: (g, 2t..)   a1: (g+8, 2t..)   a2: (g, 2t+8..)   a3: (g+8, 2t+8..)
//     B [16 k, 8 n]    b0: (2t.., g)   b1: (2t+8.., g)
//     C [16 m, 8 n]    c0, c1: (g, 2t), (g, 2t+1)        c2, c3: (g+8, 2t), (g+8, 2t+1)
#pragma once

#include "common.cuh"

#ifndef CUDA_ON_CPU

// c += a b, fp32
__device__ inline void mma_bf16(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3,
                                unsigned b0, unsigned b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of 16-bit values from shared memory. Lane 8 i + j gives the address of row j of
// matrix i (16 bytes, aligned); to[i] is row g, columns 2t and 2t+1 of matrix i.
__device__ inline void load_matrices(unsigned (&to)[4], const bf16* row) {
    const unsigned from = static_cast<unsigned>(__cvta_generic_to_shared(row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];\n"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from)
                 : "memory");
}

// Transposes an 8 x 8 matrix of 16-bit values: a lane holds row g, columns 2t and 2t+1.
__device__ inline unsigned transpose_8x8(unsigned x) {
    unsigned y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;\n" : "=r"(y) : "r"(x));
    return y;
}

#endif

__device__ inline unsigned pack_act(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const unsigned*>(&pair);
}

// The lower, or the upper, halves of two registers side by side.
__device__ inline unsigned lower_halves(unsigned x, unsigned y) {
    return __byte_perm(x, y, 0x5410);
}
__device__ inline unsigned upper_halves(unsigned x, unsigned y) {
    return __byte_perm(x, y, 0x7632);
}
