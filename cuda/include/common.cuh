// Types, roundings, 16-byte vectors and reductions that every kernel here shares.
//
// act is bf16. A comment ">act" marks a rounding to it. Sums run in an order that depends on
// nothing but the shape of one row, so that a row's bits do not depend on the batch.
#pragma once

#include <cuda_bf16.h>

using bf16 = __nv_bfloat16;

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr float INF = __builtin_bit_cast(float, 0x7f800000);

// Dynamic shared memory of the block as an array of T. After the kernel, DYNAMIC_SHARED_BYTES(kernel,
// small, large), which the build reads, says how much that is: where a block may have 99 KiB, and
// where it may have more.
#define DYNAMIC_SHARED_BYTES(kernel, small, large) static_assert((small) % 16 + (large) % 16 == 0)
#ifndef CUDA_ON_CPU
#define DYNAMIC_SHARED(T, name) extern __shared__ __align__(16) unsigned char shared_bytes[]; \
    T* name = reinterpret_cast<T*>(shared_bytes)
#endif

// Lets the blocks of the next kernel be placed as soon as all blocks of this one have called it.
__device__ inline void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns when the kernels before this one on the stream have ended and what they wrote can be read.
// The first statement of every kernel, in every block; one that reads weights, which no kernel
// writes, may do so before, and calls let_next_kernel_start first. Blocks are placed while earlier
// kernels end: a chain of short kernels does not pay for each launch. The manifest marks kernels
// that call this; the loader launches those accordingly.
__device__ inline void wait_for_earlier_kernels() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    let_next_kernel_start();
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ inline float to_float(bf16 x) { return __bfloat162float(x); }
__device__ inline bf16 to_act(float x) { return __float2bfloat16_rn(x); }
__device__ inline float round_act(float x) { return to_float(to_act(x)); }

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }
__device__ inline float silu(float x) { return x / (1.0f + expf(-x)); }
__device__ inline float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// N consecutive bf16, moved by one load or store of 2 * N bytes.
template <int N>
struct alignas(2 * N) Bf16Vector {
    bf16 at[N];
};

template <int N>
__device__ inline void load_floats(const bf16* from, float (&to)[N]) {
    const Bf16Vector<N> vector = *reinterpret_cast<const Bf16Vector<N>*>(from);
#pragma unroll
    for (int i = 0; i < N; ++i) to[i] = to_float(vector.at[i]);
}

template <int N>
__device__ inline void store_act(const float (&from)[N], bf16* to) {
    Bf16Vector<N> vector;
#pragma unroll
    for (int i = 0; i < N; ++i) vector.at[i] = to_act(from[i]);
    *reinterpret_cast<Bf16Vector<N>*>(to) = vector;
}

// The same bits in every lane.
__device__ inline float warp_sum(float x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) x += __shfl_xor_sync(ALL_LANES, x, step);
    return x;
}

__device__ inline float warp_max(float x) {
#pragma unroll
    for (int step = WARP / 2; step > 0; step /= 2) {
        x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, step));
    }
    return x;
}

// Sum over a block of whole warps, at most 32; the same bits in every thread. `scratch`: 32 floats
// of shared memory that no thread still reads.
__device__ inline float block_sum(float x, float* scratch) {
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    x = warp_sum(x);
    if (lane == 0) scratch[warp] = x;
    __syncthreads();
    return warp_sum(lane < static_cast<int>(blockDim.x) / WARP ? scratch[lane] : 0.0f);
}
