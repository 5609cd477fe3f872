// scatter: out.flat[indices[i]] = values[i], for values of 4 and of 8 bytes.
//
// indices int32 [n], without repeats. Grid (ceil(n / block)). Check: tests/test_cuda_ops.py
#include "common.cuh"

template <typename T>
__device__ inline void scatter(const T* values, const int* indices, T* out, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[indices[i]] = values[i];
}

extern "C" __global__ void scatter_32_kernel(const unsigned* values, const int* indices,
                                             unsigned* out, int n) {
    wait_for_earlier_kernels();
    scatter(values, indices, out, n);
}

extern "C" __global__ void scatter_64_kernel(const unsigned long long* values, const int* indices,
                                             unsigned long long* out, int n) {
    wait_for_earlier_kernels();
    scatter(values, indices, out, n);
}
