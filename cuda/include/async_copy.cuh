// Copies from global to shared memory that go on while the thread does (sm_80 and later).
#pragma once

#include "common.cuh"

using CopyBarrier = unsigned long long;  // see bulk copies

#ifndef CUDA_ON_CPU

// 16 bytes, both addresses multiples of 16.
__device__ inline void copy_async_16(bf16* to_shared, const bf16* from) {
    const unsigned to = static_cast<unsigned>(__cvta_generic_to_shared(to_shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;\n" ::"r"(to), "l"(from) : "memory");
}

// Closes a group: the copies this thread has started since the last one, maybe none.
__device__ inline void end_copy_group() { asm volatile("cp.async.commit_group;\n" ::: "memory"); }

// Returns when at most PENDING of this thread's latest groups are unfinished.
template <int PENDING>
__device__ inline void wait_copy_groups() {
    asm volatile("cp.async.wait_group %0;\n" ::"n"(PENDING) : "memory");
}


// Copies of whole rows by the copy engine, which one thread asks for (sm_90 and later). They report
// their bytes to a barrier in shared memory, which completes a phase when all that was announced has
// come: the first phase has parity 0, the next 1, then 0 again.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define BULK_COPIES
#endif
#ifdef BULK_COPIES
__device__ inline unsigned shared_address(const void* at) {
    return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

// By one thread, before any thread uses it.
__device__ inline void init_copy_barrier(CopyBarrier* barrier) {
    asm volatile(
        "mbarrier.init.shared::cta.b64 [%0], 1;\n"
        "fence.mbarrier_init.release.cluster;\n" ::"r"(shared_address(barrier))
        : "memory");
}

// Announces the bytes of a phase; by one thread, before it asks for the copies.
__device__ inline void expect_copies(CopyBarrier* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(
                     shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

// Addresses and bytes are multiples of 16.
__device__ inline void copy_bulk(void* to_shared, const void* from, int bytes,
                                 CopyBarrier* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::
            "r"(shared_address(to_shared)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}

__device__ inline void wait_for_copies(CopyBarrier* barrier, unsigned parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}\n" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
}

// What this thread has written to shared memory comes before the bulk copies that are asked for
// after this and a barrier.
__device__ inline void order_before_bulk_copies() {
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}
#endif

#endif
