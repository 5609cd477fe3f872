// Runs the kernels of cuda/ on the CPU, for tests: one block at a time, or one cluster of blocks, each
// thread a fiber that runs until it waits for others. Included before a kernel's source, which is then
// compiled as C++.
//
// Holds what the kernels use of CUDA and no more. What it can show: wrong indices, wrong formulas,
// missing writes, a barrier that not all threads reach (reported as a deadlock). What it cannot:
// races between blocks or between barriers, speed, and how expf rounds on a GPU. Blocks of a cluster
// have dynamic shared memory of their own; `__shared__` variables they would share.
#pragma once
#define CUDA_ON_CPU

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <utility>
#include <vector>

#define __global__
#define __device__
#define __shared__ static
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__

using std::isfinite;

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

// What of <cuda_bf16.h> is used; the test puts an empty file of that name on the include path.
struct __nv_bfloat16 { unsigned short bits; };
struct alignas(4) __nv_bfloat162 { __nv_bfloat16 x, y; };
inline float __bfloat162float(__nv_bfloat16 x) {
    return __builtin_bit_cast(float, static_cast<unsigned>(x.bits) << 16);
}
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    const unsigned bits = __builtin_bit_cast(unsigned, x);
    if (std::isnan(x)) return {0x7fff};
    return {static_cast<unsigned short>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}

static uint3 threadIdx, blockIdx;
static dim3 blockDim, gridDim;

namespace on_cpu {

constexpr int WARP_SIZE = 32;
constexpr size_t STACK = 128 * 1024;
constexpr int SHARED = 256 * 1024, MAX_CLUSTER = 2;

// Threads that wait for each other; those that have ended count as arrived.
struct Barrier {
    int members = 0, arrived = 0, ended = 0;
    unsigned generation = 0;
};

struct Warp {
    Barrier barrier;
    unsigned long long values[WARP_SIZE];
    unsigned registers[WARP_SIZE][6];
};

// 16 bytes that a thread has asked for and not waited for.
struct Copy {
    void* to;
    const void* from;
};

struct Fiber {
    ucontext_t context;
    std::vector<char> stack;
    bool done;
    std::vector<std::vector<Copy>> copies;  // groups, the last one open
};

alignas(16) static unsigned char dynamic_shared[MAX_CLUSTER][SHARED];  // of each block

static std::vector<Fiber> fibers;  // those of a cluster, block by block; so are the warps
static std::vector<Warp> warps;
static Barrier blocks[MAX_CLUSTER], cluster;
static int block_threads;
static ucontext_t scheduler;
static int current;
static bool progress;
static std::function<void()> body;

inline Warp& warp() { return warps[current / WARP_SIZE]; }
inline int lane() { return current % WARP_SIZE; }
inline int rank() { return current / block_threads; }  // of the block in its cluster
inline void yield() { swapcontext(&fibers[current].context, &scheduler); }

inline void wait(Barrier& barrier) {
    const unsigned generation = barrier.generation;
    ++barrier.arrived;
    progress = true;
    while (barrier.generation == generation) {
        if (barrier.arrived + barrier.ended == barrier.members) {
            barrier.arrived = 0;
            ++barrier.generation;
            progress = true;
        } else {
            yield();
        }
    }
}

// hopper_on_cpu.h
inline void begin_cluster();
inline void end_cluster();

inline void run_thread() {
    body();
    fibers[current].done = true;
    ++blocks[rank()].ended;
    ++cluster.ended;
    ++warp().barrier.ended;
    progress = true;
    yield();
}

// The threads of a block run in their order. Those of several blocks do so in another order each
// time, and some warp sleeps until the others get no further, or for some time: what does not wait
// for it goes ahead.
inline void run_cluster(uint3 first, int size, int threads) {
    const int all = size * threads;
    if (size > MAX_CLUSTER || size > 1 && threads % WARP_SIZE != 0) std::abort();
    if (static_cast<int>(fibers.size()) < all) fibers.resize(all);
    warps.assign((all + WARP_SIZE - 1) / WARP_SIZE, Warp());
    block_threads = threads;
    cluster = Barrier();
    cluster.members = all;
    for (int i = 0; i < size; ++i) {
        blocks[i] = Barrier();
        blocks[i].members = threads;
        std::memset(dynamic_shared[i], 0xff, SHARED);
    }
    std::vector<int> order(all);
    for (int i = 0; i < all; ++i) {
        order[i] = i;
        Fiber& fiber = fibers[i];
        fiber.stack.resize(STACK);
        fiber.done = false;
        fiber.copies.assign(1, {});
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = STACK;
        makecontext(&fiber.context, run_thread, 0);
        ++warps[i / WARP_SIZE].barrier.members;
    }
    begin_cluster();
    std::minstd_rand random;
    constexpr int NONE = -1, TURNS = 32;
    int asleep = NONE;
    for (int left = all; left > 0;) {
        progress = false;
        if (size > 1) std::shuffle(order.begin(), order.end(), random);
        for (const int i : order) {
            if (fibers[i].done || i / WARP_SIZE == asleep) continue;
            current = i;
            const unsigned thread = i % threads;
            threadIdx = {thread % blockDim.x, thread / blockDim.x, 0};
            blockIdx = {first.x + i / threads, first.y, first.z};
            swapcontext(&scheduler, &fibers[i].context);
            left -= fibers[i].done;
        }
        if (size > 1 && progress && (asleep == NONE || random() / 256 % TURNS == 0)) {
            asleep = random() / 256 % warps.size();
        } else if (!progress && asleep != NONE) {
            asleep = NONE;
        } else if (!progress) {
            std::fprintf(stderr, "deadlock: not all threads reach a barrier\n");
            std::abort();
        }
    }
    end_cluster();
}

template <typename... Parameters, size_t... Index>
void launch(void (*kernel)(Parameters...), int size, unsigned bound, const unsigned* grid,
            const unsigned* threads, void** arguments, std::index_sequence<Index...>) {
    if (grid[0] % size != 0 || threads[0] * threads[1] > bound) {
        std::fprintf(stderr, "no whole clusters, or more threads than the kernel is compiled for\n");
        std::abort();
    }
    gridDim = {grid[0], grid[1], grid[2]};
    blockDim = {threads[0], threads[1], threads[2]};
    body = [=] { kernel(*static_cast<Parameters*>(arguments[Index])...); };
    for (unsigned z = 0; z < grid[2]; ++z) {
        for (unsigned y = 0; y < grid[1]; ++y) {
            for (unsigned x = 0; x < grid[0]; x += size) {
                run_cluster({x, y, z}, size, threads[0] * threads[1]);
            }
        }
    }
}

// size: of a cluster, along x. bound: of threads.
template <typename... Parameters>
void launch(void (*kernel)(Parameters...), int size, unsigned bound, const unsigned* grid,
            const unsigned* threads, void** arguments) {
    launch(kernel, size, bound, grid, threads, arguments, std::index_sequence_for<Parameters...>());
}

// The value that lane `source` gives.
template <typename T>
T exchange(T x, int source) {
    Warp& own = warp();
    std::memcpy(&own.values[lane()], &x, sizeof(T));
    wait(own.barrier);
    std::memcpy(&x, &own.values[source], sizeof(T));
    wait(own.barrier);
    return x;
}

inline float bf16_at(unsigned packed, int half) {
    const unsigned bits = (half ? packed >> 16 : packed & 0xffffu) << 16;
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

}  // namespace on_cpu

#define LAUNCHER(kernel, size, bound)                                                        \
    extern "C" void launch_##kernel(const unsigned* grid, const unsigned* threads, void** a) { \
        on_cpu::launch(kernel, size, bound, grid, threads, a);                               \
    }

#define DYNAMIC_SHARED(T, name) T* name = reinterpret_cast<T*>(on_cpu::dynamic_shared[on_cpu::rank()])

inline void __syncthreads() { on_cpu::wait(on_cpu::blocks[on_cpu::rank()]); }
inline void __syncwarp() { on_cpu::wait(on_cpu::warp().barrier); }

template <typename T>
T __shfl_xor_sync(unsigned, T x, int mask) {
    return on_cpu::exchange(x, on_cpu::lane() ^ mask);
}
template <typename T>
T __shfl_sync(unsigned, T x, int source) {
    return on_cpu::exchange(x, source);
}
template <typename T>
T __shfl_up_sync(unsigned, T x, int step) {
    return on_cpu::exchange(x, on_cpu::lane() >= step ? on_cpu::lane() - step : on_cpu::lane());
}
inline unsigned __ballot_sync(unsigned, bool x) {
    unsigned mask = 0;
    for (int i = 0; i < on_cpu::WARP_SIZE; ++i) mask |= on_cpu::exchange<unsigned>(x, i) << i;
    return mask;
}

template <typename T>
T atomicAdd(T* at, T x) {
    const T before = *at;
    *at += x;
    return before;
}

template <typename T>
T atomicOr(T* at, T x) {
    const T before = *at;
    *at |= x;
    return before;
}

inline int min(int x, int y) { return x < y ? x : y; }
inline int max(int x, int y) { return x > y ? x : y; }
inline int __clzll(long long x) { return __builtin_clzll(static_cast<unsigned long long>(x)); }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }
inline unsigned __float_as_uint(float x) { return __builtin_bit_cast(unsigned, x); }
inline float __uint_as_float(unsigned x) { return __builtin_bit_cast(float, x); }
// Roundings as the host's own, which is not told to fuse.
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rz(float x, float y) {  // of numbers whose sum a double holds
    const double sum = static_cast<double>(x) + y;
    const float rounded = static_cast<float>(sum);
    return std::fabs(rounded) > std::fabs(sum) ? std::nextafterf(rounded, 0.0f) : rounded;
}
inline float __fdiv_rn(float x, float y) { return x / y; }
inline unsigned long long __umul64hi(unsigned long long x, unsigned long long y) {
    return static_cast<unsigned long long>(static_cast<unsigned __int128>(x) * y >> 64);
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const unsigned long long bytes = static_cast<unsigned long long>(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        result |= static_cast<unsigned>(bytes >> (selector >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    }
    return result;
}
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float x, float y) { return x / y; }
inline void sincospif(float x, float* sine, float* cosine) {
    *sine = static_cast<float>(std::sin(x * M_PI));
    *cosine = static_cast<float>(std::cos(x * M_PI));
}

// See cuda/include/tensor_core.cuh for the layouts.
inline void mma_bf16(float (&c)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                     unsigned b1) {
    on_cpu::Warp& warp = on_cpu::warp();
    const unsigned own[6] = {a0, a1, a2, a3, b0, b1};
    std::memcpy(warp.registers[on_cpu::lane()], own, sizeof(own));
    on_cpu::wait(warp.barrier);
    const int g = on_cpu::lane() / 4, t = on_cpu::lane() % 4;
    for (int i = 0; i < 4; ++i) {
        const int n = 2 * t + i % 2;
        for (int k = 0; k < 16; ++k) {
            const unsigned* a = warp.registers[g * 4 + k % 8 / 2];
            const unsigned* b = warp.registers[n * 4 + k % 8 / 2];
            c[i] += on_cpu::bf16_at(a[i / 2 + k / 8 * 2], k % 2) *
                    on_cpu::bf16_at(b[4 + k / 8], k % 2);
        }
    }
    on_cpu::wait(warp.barrier);
}

// See cuda/include/async_copy.cuh. A copy is made when its thread waits for it, and no earlier.
inline void copy_async_16(__nv_bfloat16* to, const __nv_bfloat16* from) {
    on_cpu::fibers[on_cpu::current].copies.back().push_back({to, from});
}
inline void end_copy_group() { on_cpu::fibers[on_cpu::current].copies.emplace_back(); }
template <int PENDING>
void wait_copy_groups() {
    auto& groups = on_cpu::fibers[on_cpu::current].copies;
    while (groups.size() > PENDING + 1) {
        for (const on_cpu::Copy& copy : groups.front()) std::memcpy(copy.to, copy.from, 16);
        groups.erase(groups.begin());
    }
}

inline void load_matrices(unsigned (&to)[4], const __nv_bfloat16* row) {
    on_cpu::Warp& warp = on_cpu::warp();
    warp.values[on_cpu::lane()] = reinterpret_cast<unsigned long long>(row);
    on_cpu::wait(warp.barrier);
    const int g = on_cpu::lane() / 4, t = on_cpu::lane() % 4;
    for (int i = 0; i < 4; ++i) {
        std::memcpy(&to[i], reinterpret_cast<const char*>(warp.values[8 * i + g]) + 4 * t, 4);
    }
    on_cpu::wait(warp.barrier);
}

inline unsigned transpose_8x8(unsigned x) {
    on_cpu::Warp& warp = on_cpu::warp();
    warp.registers[on_cpu::lane()][0] = x;
    on_cpu::wait(warp.barrier);
    const int g = on_cpu::lane() / 4, t = on_cpu::lane() % 4;
    unsigned result = 0;
    for (int i = 0; i < 2; ++i) {
        const unsigned packed = warp.registers[(2 * t + i) * 4 + g / 2][0];
        result |= (packed >> 16 * (g % 2) & 0xffffu) << 16 * i;
    }
    on_cpu::wait(warp.barrier);
    return result;
}

#ifndef NO_BULK_COPIES
#define BULK_COPIES
#endif
#include "hopper_on_cpu.h"
