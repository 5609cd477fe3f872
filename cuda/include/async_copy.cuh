// Copies from global to shared memory that go on while the thread does (sm_80 and later).
#pragma once

#include "barrier.cuh"

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

// Copies of whole rows by the copy engine, which one thread asks for, where BULK_COPIES is defined. They
// report their bytes to a barrier (barrier.cuh).
#ifdef BULK_COPIES

// Addresses and bytes are multiples of 16.
__device__ inline void copy_bulk(void* to_shared, const void* from, int bytes,
                                 Barrier* barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];\n" ::
            "r"(shared_address(to_shared)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
}

// What this thread has written to shared memory comes before the bulk copies that are asked for
// after this and a barrier.
__device__ inline void order_before_bulk_copies() {
    asm volatile("fence.proxy.async.shared::cta;\n" ::: "memory");
}
#endif

#endif
