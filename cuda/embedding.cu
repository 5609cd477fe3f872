// embed: out[t] = weight[ids[t]];  take_rows: out[i] = x[rows[i]].  One kernel.
//
// indices int32 [rows], table bf16 [*, H], out bf16 [rows, H]; H a multiple of 8. An index below 0
// is a padding row: zeros are written. Grid (rows), any block.
// Check: tools/gpu_check.py --only embedding. Time: tools/bench_ops.py
#include "common.cuh"

extern "C" __global__ void take_rows_kernel(const int* __restrict__ indices,
                                            const bf16* __restrict__ table,
                                            bf16* __restrict__ out, int H) {
    wait_for_earlier_kernels();
    const long long row = indices[blockIdx.x];
    const uint4* from = reinterpret_cast<const uint4*>(table + row * H);
    uint4* to = reinterpret_cast<uint4*>(out + static_cast<long long>(blockIdx.x) * H);
    for (int i = threadIdx.x; i < H / 8; i += blockDim.x) {
        to[i] = row < 0 ? make_uint4(0, 0, 0, 0) : from[i];
    }
}
