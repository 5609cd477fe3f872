// GEMM of many rows: out[m, n] = sum over k of x[m, k] * w[n, k], bf16 operands, fp32 sums.
//
//     x   act  [M, K]    activations
//     w   bf16 [N, K]    weight; silu_mul: [2 N, K], N gate rows, then N up rows
//     out act  [M, N]    silu_mul: silu(x gate^T >act) (>act) * (x up^T >act)  >act
//         fp32 [S, M, N] segment s holds the sum over its own part of K, not rounded
//
// A cluster of two blocks has a tile of 256 rows of x and BLOCK_N of w: 128 rows of x a block, and
// each half of the weight rows is read once and put into the shared memory of both. Without that, L2
// is what limits 256 rows: each block would have to read all it multiplies. Grid: twice the number of
// clusters, each of which walks over many tiles.
//
// One thread of a block keeps a ring of stages, 64 of k each, filled; two warpgroups multiply, 64 rows
// each. The copies go on while a tile's results are stored. The first stages of the weight are under
// way before the kernels before this one have ended (common.cuh).
//
// A sum takes its products in ascending order of k, 16 at a time in the tensor core: the same bits
// as triton_aot/kernels/gemm.py, for any M. K and the segments are multiples of 64, N of 8.
// Check: tools/gpu_check.py --only gemm invariance. Time: tools/bench_ops.py --only linear
#include "gemm.cuh"
#include "hopper.cuh"
#include "tensor_core.cuh"

constexpr int BLOCK_K = 64, K_STEP = 16;
constexpr int CLUSTER = 2, GROUPS = 2;  // blocks; warpgroups of a block that multiply
constexpr int ROWS = GROUPS * 64;       // of x, a block
constexpr int MULTIPLYING = GROUPS * WARPGROUP;  // threads
// A wide tile's sums need more registers than a third of 512, which is what four threads of a
// multiprocessor's quarter share, in steps of 8: a group that copies gives them to those that multiply.
// Other tiles copy with one warp, so that blocks of the next kernel fit beside them.
constexpr int WIDE = 192, COPY_REGISTERS = 56, MULTIPLY_REGISTERS = 224;
template <int BLOCK_N>
constexpr int THREADS = MULTIPLYING + (BLOCK_N > WIDE ? WARPGROUP : WARP);
constexpr int ROW_BYTES = BLOCK_K * sizeof(bf16);
constexpr int ALIGNED = 1024;     // bytes, of a block of a tensor map

// BLOCK_N: weight rows of a tile.
template <int BLOCK_N>
struct Stage {
    unsigned char x[ROWS * ROW_BYTES];
    unsigned char w[BLOCK_N * ROW_BYTES];
};

template <int BLOCK_N, int STAGES>
struct Ring {
    Stage<BLOCK_N> stages[STAGES];
    Barrier filled[STAGES], emptied[STAGES];
};

struct Tile {
    int first_m, first_n, begin, steps, segment;
};

struct Tiles {
    int M, N, K, segment, columns;

    __device__ int count_m() const { return (M + CLUSTER * ROWS - 1) / (CLUSTER * ROWS); }
    __device__ int count_n() const { return (N + columns - 1) / columns; }
    __device__ int count() const {
        return count_m() * count_n() * ((K + segment - 1) / segment);
    }
    // Down a group of row tiles, whose rows of x stay in L2, then the next column of tiles.
    __device__ Tile at(int index) const {
        const int tiles_m = count_m(), tiles_n = count_n(), most = K <= 4096 ? 8 : 4;
        const int s = index / (tiles_m * tiles_n);
        index -= s * tiles_m * tiles_n;
        const int group = index / (most * tiles_n), size = min(tiles_m - group * most, most);
        index -= group * most * tiles_n;
        const int begin = s * segment;
        return {(group * most + index % size) * CLUSTER * ROWS, index / size * columns, begin,
                (min(begin + segment, K) - begin) / BLOCK_K, s};
    }
};

// By one thread.
template <Form FORM, int BLOCK_N, int STAGES>
__device__ inline void fill(Ring<BLOCK_N, STAGES>& ring, const TensorMap& x, const TensorMap& w,
                            const Tiles& tiles, int rank) {
    constexpr int HALF = BLOCK_N / CLUSTER;
    const int clusters = gridDim.x / CLUSTER;
    unsigned turn = 0;  // stages filled before
    for (int index = blockIdx.x / CLUSTER; index < tiles.count(); index += clusters) {
        const Tile tile = tiles.at(index);
        const int first_w = tile.first_n + rank * (FORM == Form::SILU_MUL ? tiles.N : HALF);
        const auto fill_w = [&](int step) {
            const int slot = turn % STAGES;
            if (turn >= STAGES) wait_for(ring.emptied + slot, turn / STAGES - 1 & 1);
            arrive_and_expect(ring.filled + slot, sizeof(Stage<BLOCK_N>));
            copy_block_to_all(ring.stages[slot].w + rank * HALF * ROW_BYTES, w, first_w,
                              tile.begin + step * BLOCK_K, ring.filled + slot, CLUSTER);
        };
        const auto fill_x = [&](int step, int slot) {
            copy_block(ring.stages[slot].x, x, tile.first_m + rank * ROWS,
                       tile.begin + step * BLOCK_K, ring.filled + slot);
        };
        int early = 0;
        if (turn == 0) {
            for (; early < min(tile.steps, STAGES); ++early, ++turn) fill_w(early);
            wait_for_earlier_kernels();
            for (int step = 0; step < early; ++step) fill_x(step, step);
        }
        for (int step = early; step < tile.steps; ++step, ++turn) {
            fill_w(step);
            fill_x(step, turn % STAGES);
        }
    }
}

// 16-byte stores: the four lanes of a row, which hold 4 bytes of each of four 8-column blocks, exchange
// them so that each has a block.
__device__ inline void store_row(unsigned p0, unsigned p1, unsigned p2, unsigned p3, bf16* row, int first_n,
                                 int N, bool stored, int t) {
    const auto exchange = [](unsigned& low, unsigned& high, bool upper, int lanes) {
        const unsigned theirs = __shfl_xor_sync(ALL_LANES, upper ? low : high, lanes);
        low = upper ? theirs : low;
        high = upper ? high : theirs;
    };
    exchange(p0, p1, t & 1, 1);
    exchange(p2, p3, t & 1, 1);
    exchange(p0, p2, t & 2, 2);
    exchange(p1, p3, t & 2, 2);
    const int n = first_n + 8 * t;
    if (stored && n < N) *reinterpret_cast<uint4*>(row + n) = make_uint4(p0, p1, p2, p3);
}

// The sums of a tile, of one or two products of COUNT registers side by side. silu_mul: the first half of
// them is of gate rows.
template <int PRODUCTS, int COUNT>
struct Sums {
    float of[PRODUCTS][COUNT];

    __device__ float operator[](int i) const { return of[i / COUNT][i % COUNT]; }
};

template <Form FORM, int COLUMNS, int PRODUCTS, int COUNT, typename Out>
__device__ inline void store(const Sums<PRODUCTS, COUNT>& sums, Out* __restrict__ out, const Tile& tile,
                             int first_row, int M, int N, int lane) {
    constexpr int BLOCKS = COLUMNS / 8;
    const int g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int m = first_row + g + 8 * half;
        const bool stored = m < M;
        Out* row = out + (static_cast<long long>(tile.segment) * M + m) * N;
        const auto pair = [&](int j, int gate) {  // of block j
            const int i = gate * (COLUMNS / 2) + 4 * j + 2 * half;
            return make_float2(sums[i], sums[i + 1]);
        };
        if constexpr (FORM == Form::FP32) {
#pragma unroll
            for (int j = 0; j < BLOCKS; ++j) {
                const int n = tile.first_n + 8 * j + 2 * t;
                if (stored && n < N) *reinterpret_cast<float2*>(row + n) = pair(j, 0);
            }
        } else {
            const auto packed = [&](int j) {
                const float2 x = pair(j, 0);
                if constexpr (FORM == Form::SILU_MUL) return silu_mul(x, pair(j, 1));
                return pack_act(x.x, x.y);
            };
#pragma unroll
            for (int j = 0; j + 4 <= BLOCKS; j += 4) {
                store_row(packed(j), packed(j + 1), packed(j + 2), packed(j + 3), row,
                          tile.first_n + 8 * j, N, stored, t);
            }
#pragma unroll
            for (int j = BLOCKS / 4 * 4; j < BLOCKS; ++j) {
                const int n = tile.first_n + 8 * j + 2 * t;
                const unsigned two = packed(j);
                if (stored && n < N) *reinterpret_cast<unsigned*>(row + n) = two;
            }
        }
    }
}

template <Form FORM, int BLOCK_N, int STAGES, typename Out>
__device__ inline void gemm_cluster(const TensorMap& x, const TensorMap& w, Out* __restrict__ out, int M,
                                    int N, int K, int segment) {
    constexpr int COLUMNS = FORM == Form::SILU_MUL ? BLOCK_N / 2 : BLOCK_N;
    constexpr int PRODUCTS = BLOCK_N > 256 ? 2 : 1, COUNT = BLOCK_N / PRODUCTS / 2;
    static_assert(BLOCK_N % 16 == 0);
    DYNAMIC_SHARED(unsigned char, memory);
    auto& ring = *reinterpret_cast<Ring<BLOCK_N, STAGES>*>(
        memory + (ALIGNED - shared_address(memory) % ALIGNED) % ALIGNED);
    let_next_kernel_start();
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, rank = cluster_rank();
    const Tiles tiles = {M, N, K, segment, COLUMNS};
    if (threadIdx.x == MULTIPLYING) {
        prefetch_map(x);
        prefetch_map(w);
        for (int i = 0; i < STAGES; ++i) {
            init_barrier(ring.filled + i, 1);
            init_barrier(ring.emptied + i, CLUSTER * GROUPS * 4);
        }
        publish_barriers();
    }
    sync_cluster();

    const int group = warp / 4;
    if (group == GROUPS) {
        if (BLOCK_N > WIDE) give_registers<COPY_REGISTERS>();
        if (threadIdx.x == MULTIPLYING) fill<FORM>(ring, x, w, tiles, rank);
        __syncwarp();
    } else {
        if (BLOCK_N > WIDE) take_registers<MULTIPLY_REGISTERS>();
        const auto release = [&](unsigned slot) {  // a lane a block of the cluster
            if (lane < CLUSTER) arrive_at(ring.emptied + slot, lane);
        };
        unsigned turn = 0;
        for (int index = blockIdx.x / CLUSTER; index < tiles.count(); index += gridDim.x / CLUSTER) {
            const Tile tile = tiles.at(index);
            Sums<PRODUCTS, COUNT> sums = {};
            for (int step = 0; step < tile.steps; ++step, ++turn) {
                const unsigned slot = turn % STAGES;
                wait_for(ring.filled + slot, turn / STAGES & 1);
                const unsigned long long a = operand(ring.stages[slot].x + group * 64 * ROW_BYTES);
                const unsigned long long b = operand(ring.stages[slot].w);
#pragma unroll
                for (int i = 0; i < PRODUCTS; ++i) hold(sums.of[i]);
                begin_products();
#pragma unroll
                for (int k = 0; k < BLOCK_K / K_STEP; ++k) {
#pragma unroll
                    for (int i = 0; i < PRODUCTS; ++i) {
                        multiply(sums.of[i], a + 2 * k, b + i * (2 * COUNT * ROW_BYTES / 16) + 2 * k);
                    }
                }
                end_products();
                if (step > 0) {
                    wait_products<1>();
                    release((turn - 1) % STAGES);
                }
            }
            wait_products<0>();
#pragma unroll
            for (int i = 0; i < PRODUCTS; ++i) hold(sums.of[i]);
            release((turn - 1) % STAGES);
            const int first_row = tile.first_m + rank * ROWS + warp * 16;
            store<FORM, COLUMNS>(sums, out, tile, first_row, M, N, lane);
        }
    }
    sync_cluster();  // before its shared memory goes, which the other block writes to
}

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS<160>, 1)
    gemm_cluster_bf16_160x256_kernel(const __grid_constant__ TensorMap x,
                         const __grid_constant__ TensorMap w, bf16* __restrict__ out, int M, int N,
                         int K, int segment) {
    gemm_cluster<Form::BF16, 160, 6>(x, w, out, M, N, K, segment);
}
DYNAMIC_SHARED_BYTES(gemm_cluster_bf16_160x256, 0, 222304);
TENSOR_MAP_ROWS(gemm_cluster_bf16_160x256, 128, 80);

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS<192>, 1)
    gemm_cluster_bf16_192x256_kernel(const __grid_constant__ TensorMap x,
                         const __grid_constant__ TensorMap w, bf16* __restrict__ out, int M, int N,
                         int K, int segment) {
    gemm_cluster<Form::BF16, 192, 5>(x, w, out, M, N, K, segment);
}
DYNAMIC_SHARED_BYTES(gemm_cluster_bf16_192x256, 0, 205904);
TENSOR_MAP_ROWS(gemm_cluster_bf16_192x256, 128, 96);

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS<256>, 1)
    gemm_cluster_bf16_256x256_kernel(const __grid_constant__ TensorMap x,
                         const __grid_constant__ TensorMap w, bf16* __restrict__ out, int M, int N,
                         int K, int segment) {
    gemm_cluster<Form::BF16, 256, 4>(x, w, out, M, N, K, segment);
}
DYNAMIC_SHARED_BYTES(gemm_cluster_bf16_256x256, 0, 197696);
TENSOR_MAP_ROWS(gemm_cluster_bf16_256x256, 128, 128);

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS<128>, 1)
    gemm_cluster_fp32_128x256_kernel(const __grid_constant__ TensorMap x,
                         const __grid_constant__ TensorMap w, float* __restrict__ out, int M, int N,
                         int K, int segment) {
    gemm_cluster<Form::FP32, 128, 6>(x, w, out, M, N, K, segment);
}
DYNAMIC_SHARED_BYTES(gemm_cluster_fp32_128x256, 0, 197728);
TENSOR_MAP_ROWS(gemm_cluster_fp32_128x256, 128, 64);

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS<160>, 1)
    gemm_cluster_fp32_160x256_kernel(const __grid_constant__ TensorMap x,
                         const __grid_constant__ TensorMap w, float* __restrict__ out, int M, int N,
                         int K, int segment) {
    gemm_cluster<Form::FP32, 160, 6>(x, w, out, M, N, K, segment);
}
DYNAMIC_SHARED_BYTES(gemm_cluster_fp32_160x256, 0, 222304);
TENSOR_MAP_ROWS(gemm_cluster_fp32_160x256, 128, 80);

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS<256>, 1)
    gemm_cluster_fp32_256x256_kernel(const __grid_constant__ TensorMap x,
                         const __grid_constant__ TensorMap w, float* __restrict__ out, int M, int N,
                         int K, int segment) {
    gemm_cluster<Form::FP32, 256, 4>(x, w, out, M, N, K, segment);
}
DYNAMIC_SHARED_BYTES(gemm_cluster_fp32_256x256, 0, 197696);
TENSOR_MAP_ROWS(gemm_cluster_fp32_256x256, 128, 128);

extern "C" __global__ void __cluster_dims__(CLUSTER, 1, 1) __launch_bounds__(THREADS<288>, 1)
    gemm_cluster_silu_mul_288x256_kernel(const __grid_constant__ TensorMap x,
                         const __grid_constant__ TensorMap w, bf16* __restrict__ out, int M, int N,
                         int K, int segment) {
    gemm_cluster<Form::SILU_MUL, 288, 4>(x, w, out, M, N, K, segment);
}
DYNAMIC_SHARED_BYTES(gemm_cluster_silu_mul_288x256, 0, 214080);
TENSOR_MAP_ROWS(gemm_cluster_silu_mul_288x256, 128, 144);
