// Barriers in shared memory for what the copy engine brings (sm_90 and later).
//
// A barrier completes a phase when as many arrivals have come as it was made for and all bytes that
// were announced. The first phase has parity 0, the next 1, then 0 again.
#pragma once

#include "common.cuh"

using Barrier = unsigned long long;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define BULK_COPIES

__device__ inline unsigned shared_address(const void* at) {
    return static_cast<unsigned>(__cvta_generic_to_shared(at));
}

__device__ inline void init_barrier(Barrier* barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n" ::"r"(shared_address(barrier)),
                 "r"(arrivals)
                 : "memory");
}

// After the last init, before other threads come to know: the copy engine sees them.
__device__ inline void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;\n" ::: "memory");
}

// One arrival, which announces bytes.
__device__ inline void arrive_and_expect(Barrier* barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;\n" ::"r"(
                     shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
}

__device__ inline void wait_for(Barrier* barrier, unsigned parity) {
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
#endif
