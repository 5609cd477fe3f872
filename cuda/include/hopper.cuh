// What sm_90 alone has: clusters of blocks, tiles of arrays by the copy engine, and products of a
// warpgroup (4 warps) straight from shared memory.
#pragma once

#include "barrier.cuh"

constexpr int WARPGROUP = 4 * WARP;

// What the host encodes (CUtensorMap): an array's address, shape, and the block that a copy brings.
struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

// After a kernel, which the build reads: rows of the blocks that its maps cut x and w into. A block is
// 64 bf16 wide and is put down in 128-byte rows whose 16-byte chunks are swapped: chunk c of row r lies
// where c ^ (r % 8) would. It begins at a multiple of 1,024 bytes.
#define TENSOR_MAP_ROWS(kernel, x_rows, w_rows) static_assert((x_rows) <= 256 && (w_rows) <= 256)

#ifndef CUDA_ON_CPU

// What a thread of a warpgroup may have from now on: fewer than before, or more, for which it waits.
template <int REGISTERS>
__device__ inline void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
}
template <int REGISTERS>
__device__ inline void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;\n" ::"n"(REGISTERS));
}

__device__ inline int cluster_rank() {
    int rank;
    asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    return rank;
}

// All threads of all blocks of the cluster, which see what the others wrote, and barriers that they
// published, before.
__device__ inline void sync_cluster() {
    asm volatile(
        "barrier.cluster.arrive.release.aligned;\n"
        "barrier.cluster.wait.acquire.aligned;\n" ::: "memory");
}

// One arrival at the barrier that lies at the same place in a block of the cluster.
__device__ inline void arrive_at(Barrier* barrier, int rank) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(rank)
        : "memory");
}

__device__ inline void prefetch_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];\n" ::"l"(&map) : "memory");
}

// The block of an array that begins at (row, column); zeros where that is past the end.
__device__ inline void copy_block(void* to, const TensorMap& map, int row, int column,
                                  Barrier* barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%2, %3}], [%4];\n" ::"r"(shared_address(to)),
        "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier))
        : "memory");
}

// The same to that place in each of the first `blocks` of the cluster, whose barriers all get its bytes.
__device__ inline void copy_block_to_all(void* to, const TensorMap& map, int row, int column,
                                         Barrier* barrier, int blocks) {
    const unsigned short mask = static_cast<unsigned short>((1 << blocks) - 1);
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;\n" ::"r"(shared_address(to)),
        "l"(&map), "r"(column), "r"(row), "r"(shared_address(barrier)), "h"(mask)
        : "memory");
}

#endif

// An operand of a product, rows of 64 bf16 as `copy_block` puts them down, from this row on. 16 more of
// k are 2 more.
__device__ inline unsigned long long operand(const void* rows) {
    constexpr unsigned long long SWIZZLED_128 = 1ull << 62, EIGHT_ROWS = 1024 / 16;
    return (shared_address(rows) & 0x3ffff) / 16 | 1ull << 16 | EIGHT_ROWS << 32 | SWIZZLED_128;
}

#ifndef CUDA_ON_CPU

// Around products that are under way: what is done to the sums before comes before, what after, after.
template <int COUNT>
__device__ inline void hold(float (&sums)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

__device__ inline void begin_products() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ inline void end_products() {
    asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

// Returns when at most PENDING of the groups that `end_products` closed are not done.
template <int PENDING>
__device__ inline void wait_products() {
    asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(PENDING) : "memory");
}

#define SUMS_8(i)                                                                            \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), \
        "+f"(c[i + 6]), "+f"(c[i + 7])
#define SUMS_32(i) SUMS_8(i), SUMS_8(i + 8), SUMS_8(i + 16), SUMS_8(i + 24)
#define NAMES_32_0                                                                        \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22," \
    "%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define NAMES_32_1                                                                          \
    "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52," \
    "%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define NAMES_32_2                                                                          \
    "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84," \
    "%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define NAMES_32_3                                                                               \
    "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,"    \
    "%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define MULTIPLY(columns, names, a, b)                                                      \
    "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32.bf16.bf16 {" names "}, " a ", " b \
    ", 1, 1, 1, 0, 0;\n"

// c += a b^T: 64 rows of a, 2 * COUNT of b, 16 of k. A lane of warp w holds of row 16 w + lane / 4 (c[4 j],
// c[4 j + 1]) and of the row 8 further down (c[4 j + 2], c[4 j + 3]) columns 8 j + lane % 4 * 2 and the
// next one.
__device__ inline void multiply(float (&c)[64], unsigned long long a, unsigned long long b) {
    asm volatile(MULTIPLY("128", NAMES_32_0 "," NAMES_32_1, "%64", "%65")
                 : SUMS_32(0), SUMS_32(32)
                 : "l"(a), "l"(b));
}
__device__ inline void multiply(float (&c)[72], unsigned long long a, unsigned long long b) {
    asm volatile(MULTIPLY("144", NAMES_32_0 "," NAMES_32_1 ",%64,%65,%66,%67,%68,%69,%70,%71", "%72",
                          "%73")
                 : SUMS_32(0), SUMS_32(32), SUMS_8(64)
                 : "l"(a), "l"(b));
}
__device__ inline void multiply(float (&c)[80], unsigned long long a, unsigned long long b) {
    asm volatile(MULTIPLY("160",
                          NAMES_32_0 "," NAMES_32_1
                                     ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79",
                          "%80", "%81")
                 : SUMS_32(0), SUMS_32(32), SUMS_8(64), SUMS_8(72)
                 : "l"(a), "l"(b));
}
__device__ inline void multiply(float (&c)[96], unsigned long long a, unsigned long long b) {
    asm volatile(MULTIPLY("192", NAMES_32_0 "," NAMES_32_1 "," NAMES_32_2, "%96", "%97")
                 : SUMS_32(0), SUMS_32(32), SUMS_32(64)
                 : "l"(a), "l"(b));
}
__device__ inline void multiply(float (&c)[128], unsigned long long a, unsigned long long b) {
    asm volatile(MULTIPLY("256", NAMES_32_0 "," NAMES_32_1 "," NAMES_32_2 "," NAMES_32_3, "%128", "%129")
                 : SUMS_32(0), SUMS_32(32), SUMS_32(64), SUMS_32(96)
                 : "l"(a), "l"(b));
}

#endif
