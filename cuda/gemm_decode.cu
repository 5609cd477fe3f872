// GEMM of few rows: out[m, n] = sum over k of x[m, k] * w[n, k], bf16 operands, fp32 sums.
//
//     x   act  [M, K]    activations
//     w   bf16 [N, K]    weight; silu_mul: [2 N, K], N gate rows, then N up rows
//     out act  [M, N]    silu_mul: silu(x gate^T >act) (>act) * (x up^T >act)  >act
//         fp32 [S, M, N] segment s holds the sum over its own part of K, not rounded
//
// All time goes into reading the weight once. Grid (ceil(M / ROWS), ceil(N / columns), S); a block
// streams BLOCK_N weight rows (silu_mul: half of gate, and the up rows of the same outputs) through a
// ring of stages in shared memory, a warp multiplies 16 of them with 8 or 16 rows of x. Kernels of
// several widths, so that a shape finds one with which all multiprocessors have as many rows to stream. The
// first stages are under way before the kernels before this one have ended (common.cuh), so that
// memory does not idle at the border of two kernels; a block takes less than half of the shared
// memory for that.
//
// A sum takes its products in ascending order of k, 16 at a time in the tensor core: the same bits
// as triton_aot/kernels/gemm.py, for any M. K and the segments are multiples of 128.
// Check: tools/gpu_check.py --only gemm. Time: tools/bench_ops.py --only linear
#include "async_copy.cuh"
#include "gemm.cuh"
#include "tensor_core.cuh"

constexpr int CHUNK = 8;  // elements of a 16-byte copy
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int SHARED_BYTES = 101376;  // what a block may have
#else
constexpr int SHARED_BYTES = 115712;  // half of what Hopper has, or less
#endif

// BLOCK_N: weight rows of a block, 16 a warp. ROWS: of x. BLOCK_K: of a stage.
template <int BLOCK_N, int ROWS>
struct Tile {
    static constexpr int WARPS = BLOCK_N / 16;
    static constexpr int BLOCK_K = BLOCK_N > 96 ? 64 : 128;
    static constexpr int ROW_CHUNKS = BLOCK_K / CHUNK;
    static constexpr int ROWS_A_PASS = WARPS * WARP / ROW_CHUNKS;  // that all threads copy at a time
    static constexpr int STAGE = (BLOCK_N + ROWS) * BLOCK_K;
    static constexpr int STAGES = SHARED_BYTES / (STAGE * static_cast<int>(sizeof(bf16)));
    static_assert(BLOCK_N % ROWS_A_PASS == 0 && ROWS % 8 == 0);

    // Where a chunk of a stage's row lies: no two of 8 neighbouring rows in the same banks.
    __device__ static int place(int row, int chunk) {
        return row * BLOCK_K + (chunk ^ (row & 7)) * CHUNK;
    }
};

template <Form FORM, int BLOCK_N, int ROWS, typename Out>
__device__ inline void gemm_decode(const bf16* __restrict__ x, const bf16* __restrict__ w,
                                   Out* __restrict__ out, int M, int N, int K, int segment) {
    using T = Tile<BLOCK_N, ROWS>;
    constexpr int BLOCK_K = T::BLOCK_K, STAGE = T::STAGE, STAGES = T::STAGES;
    constexpr int ROW_CHUNKS = T::ROW_CHUNKS, ROWS_A_PASS = T::ROWS_A_PASS;
    constexpr int COLUMNS = FORM == Form::SILU_MUL ? BLOCK_N / 2 : BLOCK_N;
    constexpr int W_COPIES = BLOCK_N / ROWS_A_PASS;
    constexpr int X_COPIES = (ROWS + ROWS_A_PASS - 1) / ROWS_A_PASS;
    DYNAMIC_SHARED(bf16, stages);
    let_next_kernel_start();

    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int first_m = blockIdx.x * ROWS, first_n = blockIdx.y * COLUMNS;
    const int begin = blockIdx.z * segment;
    const int steps = (min(begin + segment, K) - begin) / BLOCK_K;

    // Weight rows past the end repeat the last one; for rows of x past the end there is what shared
    // memory held before. Neither is stored.
    const int chunk = threadIdx.x % ROW_CHUNKS, copy_row = threadIdx.x / ROW_CHUNKS;
    const bf16* w_rows[W_COPIES];
    const int x_rows = min(M - first_m, ROWS);
    const bf16* x_row =
        x + (first_m + copy_row) * static_cast<long long>(K) + begin + chunk * CHUNK;
#pragma unroll
    for (int i = 0; i < W_COPIES; ++i) {
        const int row = copy_row + i * ROWS_A_PASS;
        long long n = min(first_n + row, N - 1);
        if (FORM == Form::SILU_MUL) {  // a warp's 16 rows: 8 of gate, then 8 of up
            n = min(first_n + row / 16 * 8 + row % 8, N - 1);
            if (row % 16 >= 8) n += N;
        }
        w_rows[i] = w + n * K + begin + chunk * CHUNK;
    }
    const auto copy_weights = [&](int step) {
        bf16* to = stages + step % STAGES * STAGE;
#pragma unroll
        for (int i = 0; i < W_COPIES; ++i) {
            copy_async_16(to + T::place(copy_row + i * ROWS_A_PASS, chunk), w_rows[i] + step * BLOCK_K);
        }
    };
    const auto copy_x = [&](int step, bool async) {
        bf16* stage = stages + step % STAGES * STAGE + BLOCK_N * BLOCK_K;
#pragma unroll
        for (int i = 0; i < X_COPIES; ++i) {
            const int row = i * ROWS_A_PASS;
            if (copy_row + row >= x_rows) continue;
            bf16* to = stage + T::place(copy_row + row, chunk);
            const bf16* from = x_row + row * static_cast<long long>(K) + step * BLOCK_K;
            if (async) {
                copy_async_16(to, from);
            } else {
                *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from);
            }
        }
    };

#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) {
        if (step < steps) copy_weights(step);
        end_copy_group();
    }
    wait_for_earlier_kernels();
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) {
        if (step < steps) copy_x(step, false);
    }

    float sums[ROWS / 8][4] = {};
    for (int step = 0; step < steps; ++step) {
        wait_copy_groups<STAGES - 2>();
        __syncthreads();
        const int next = step + STAGES - 1;
        if (next < steps) {
            copy_weights(next);
            copy_x(next, true);
        }
        end_copy_group();

        const bf16* w_stage = stages + step % STAGES * STAGE;
        const bf16* x_stage = w_stage + BLOCK_N * BLOCK_K;
#pragma unroll
        for (int k = 0; k < ROW_CHUNKS; k += 4) {  // chunks; 32 of K
            unsigned a[2][4];
            load_matrices(a[0], w_stage + T::place(16 * warp + lane % 16, k + lane / 16));
            load_matrices(a[1], w_stage + T::place(16 * warp + lane % 16, k + 2 + lane / 16));
#pragma unroll
            for (int r = 0; r < ROWS / 8; ++r) {
                unsigned b[4];
                load_matrices(b, x_stage + T::place(8 * r + lane % 8, k + lane / 8));
                mma_bf16(sums[r], a[0][0], a[0][1], a[0][2], a[0][3], b[0], b[1]);
                mma_bf16(sums[r], a[1][0], a[1][1], a[1][2], a[1][3], b[2], b[3]);
            }
        }
    }

    const int g = lane / 4, t = lane % 4;
    const int n = first_n + warp * (COLUMNS / T::WARPS) + g;
#pragma unroll
    for (int j = 0; j < ROWS / 4; ++j) {
        const int r = j / 2, i = j % 2, m = first_m + 8 * r + 2 * t + i;
        if (m >= M) continue;
        Out* row = out + (static_cast<long long>(blockIdx.z) * M + m) * N;
        const float low = sums[r][i], high = sums[r][2 + i];
        if constexpr (FORM == Form::SILU_MUL) {
            if (n < N) row[n] = silu_mul(low, high);
        } else if constexpr (FORM == Form::BF16) {
            if (n < N) row[n] = to_act(low);
            if (n + 8 < N) row[n + 8] = to_act(high);
        } else {
            if (n < N) row[n] = low;
            if (n + 8 < N) row[n + 8] = high;
        }
    }
}

extern "C" __global__ void __launch_bounds__(128)
    gemm_decode_bf16_64x8_kernel(const bf16* __restrict__ x, const bf16* __restrict__ w,
                         bf16* __restrict__ out, int M, int N, int K, int segment) {
    gemm_decode<Form::BF16, 64, 8>(x, w, out, M, N, K, segment);
}
DYNAMIC_SHARED_BYTES(gemm_decode_bf16_64x8, 92160, 110592);

extern "C" __global__ void __launch_bounds__(160)
    gemm_decode_bf16_80x8_kernel(const bf16* __restrict__ x, const bf16* __restrict__ w,
                         bf16* __restrict__ out, int M, int N, int K, int segment) {
    gemm_decode<Form::BF16, 80, 8>(x, w, out, M, N, K, segment);
}
DYNAMIC_SHARED_BYTES(gemm_decode_bf16_80x8, 90112, 112640);

extern "C" __global__ void __launch_bounds__(192)
    gemm_decode_bf16_96x8_kernel(const bf16* __restrict__ x, const bf16* __restrict__ w,
                         bf16* __restrict__ out, int M, int N, int K, int segment) {
    gemm_decode<Form::BF16, 96, 8>(x, w, out, M, N, K, segment);
}
DYNAMIC_SHARED_BYTES(gemm_decode_bf16_96x8, 79872, 106496);

extern "C" __global__ void __launch_bounds__(128)
    gemm_decode_fp32_64x8_kernel(const bf16* __restrict__ x, const bf16* __restrict__ w,
                         float* __restrict__ out, int M, int N, int K, int segment) {
    gemm_decode<Form::FP32, 64, 8>(x, w, out, M, N, K, segment);
}
DYNAMIC_SHARED_BYTES(gemm_decode_fp32_64x8, 92160, 110592);

extern "C" __global__ void __launch_bounds__(160)
    gemm_decode_fp32_80x8_kernel(const bf16* __restrict__ x, const bf16* __restrict__ w,
                         float* __restrict__ out, int M, int N, int K, int segment) {
    gemm_decode<Form::FP32, 80, 8>(x, w, out, M, N, K, segment);
}
DYNAMIC_SHARED_BYTES(gemm_decode_fp32_80x8, 90112, 112640);

extern "C" __global__ void __launch_bounds__(128)
    gemm_decode_silu_mul_64x8_kernel(const bf16* __restrict__ x, const bf16* __restrict__ w,
                         bf16* __restrict__ out, int M, int N, int K, int segment) {
    gemm_decode<Form::SILU_MUL, 64, 8>(x, w, out, M, N, K, segment);
}
DYNAMIC_SHARED_BYTES(gemm_decode_silu_mul_64x8, 92160, 110592);

extern "C" __global__ void __launch_bounds__(192)
    gemm_decode_silu_mul_96x8_kernel(const bf16* __restrict__ x, const bf16* __restrict__ w,
                         bf16* __restrict__ out, int M, int N, int K, int segment) {
    gemm_decode<Form::SILU_MUL, 96, 8>(x, w, out, M, N, K, segment);
}
DYNAMIC_SHARED_BYTES(gemm_decode_silu_mul_96x8, 79872, 106496);

extern "C" __global__ void __launch_bounds__(288)
    gemm_decode_silu_mul_144x8_kernel(const bf16* __restrict__ x, const bf16* __restrict__ w,
                         bf16* __restrict__ out, int M, int N, int K, int segment) {
    gemm_decode<Form::SILU_MUL, 144, 8>(x, w, out, M, N, K, segment);
}
DYNAMIC_SHARED_BYTES(gemm_decode_silu_mul_144x8, 97280, 97280);

extern "C" __global__ void __launch_bounds__(128)
    gemm_decode_bf16_64x16_kernel(const bf16* __restrict__ x, const bf16* __restrict__ w,
                         bf16* __restrict__ out, int M, int N, int K, int segment) {
    gemm_decode<Form::BF16, 64, 16>(x, w, out, M, N, K, segment);
}
DYNAMIC_SHARED_BYTES(gemm_decode_bf16_64x16, 81920, 102400);

extern "C" __global__ void __launch_bounds__(160)
    gemm_decode_bf16_80x16_kernel(const bf16* __restrict__ x, const bf16* __restrict__ w,
                         bf16* __restrict__ out, int M, int N, int K, int segment) {
    gemm_decode<Form::BF16, 80, 16>(x, w, out, M, N, K, segment);
}
DYNAMIC_SHARED_BYTES(gemm_decode_bf16_80x16, 98304, 98304);

extern "C" __global__ void __launch_bounds__(192)
    gemm_decode_bf16_96x16_kernel(const bf16* __restrict__ x, const bf16* __restrict__ w,
                         bf16* __restrict__ out, int M, int N, int K, int segment) {
    gemm_decode<Form::BF16, 96, 16>(x, w, out, M, N, K, segment);
}
DYNAMIC_SHARED_BYTES(gemm_decode_bf16_96x16, 86016, 114688);

extern "C" __global__ void __launch_bounds__(128)
    gemm_decode_fp32_64x16_kernel(const bf16* __restrict__ x, const bf16* __restrict__ w,
                         float* __restrict__ out, int M, int N, int K, int segment) {
    gemm_decode<Form::FP32, 64, 16>(x, w, out, M, N, K, segment);
}
DYNAMIC_SHARED_BYTES(gemm_decode_fp32_64x16, 81920, 102400);

extern "C" __global__ void __launch_bounds__(160)
    gemm_decode_fp32_80x16_kernel(const bf16* __restrict__ x, const bf16* __restrict__ w,
                         float* __restrict__ out, int M, int N, int K, int segment) {
    gemm_decode<Form::FP32, 80, 16>(x, w, out, M, N, K, segment);
}
DYNAMIC_SHARED_BYTES(gemm_decode_fp32_80x16, 98304, 98304);

extern "C" __global__ void __launch_bounds__(128)
    gemm_decode_silu_mul_64x16_kernel(const bf16* __restrict__ x, const bf16* __restrict__ w,
                         bf16* __restrict__ out, int M, int N, int K, int segment) {
    gemm_decode<Form::SILU_MUL, 64, 16>(x, w, out, M, N, K, segment);
}
DYNAMIC_SHARED_BYTES(gemm_decode_silu_mul_64x16, 81920, 102400);

extern "C" __global__ void __launch_bounds__(192)
    gemm_decode_silu_mul_96x16_kernel(const bf16* __restrict__ x, const bf16* __restrict__ w,
                         bf16* __restrict__ out, int M, int N, int K, int segment) {
    gemm_decode<Form::SILU_MUL, 96, 16>(x, w, out, M, N, K, segment);
}
DYNAMIC_SHARED_BYTES(gemm_decode_silu_mul_96x16, 86016, 114688);

extern "C" __global__ void __launch_bounds__(288)
    gemm_decode_silu_mul_144x16_kernel(const bf16* __restrict__ x, const bf16* __restrict__ w,
                         bf16* __restrict__ out, int M, int N, int K, int segment) {
    gemm_decode<Form::SILU_MUL, 144, 16>(x, w, out, M, N, K, segment);
}
DYNAMIC_SHARED_BYTES(gemm_decode_silu_mul_144x16, 81920, 102400);
