// Shapes of the gated delta net that are the same in every Qwen3.5 size, and where things lie in a
// row of its stacked projection:
//
//     q [HK, 128] | k [HK, 128] | v [HV, 128] | z [HV, 128] | b [HV] | a [HV]
//     ------------- C channels --------------
#pragma once

#include "common.cuh"

constexpr int HEAD = 128;     // K = V
constexpr int CONV_RING = 4;  // rows of conv_state; position p lies in row p % 4
constexpr int TAPS = 4;

__device__ inline int conv_channels(int HK, int HV) { return (2 * HK + HV) * HEAD; }
__device__ inline int projection_size(int HK, int HV) {
    return conv_channels(HK, HV) + HV * HEAD + 2 * HV;
}

// ((x / sqrt(mean(x^2) + eps) >act) * weight >act) * silu(z), unrounded; one head a warp, 4 dims a
// lane.
__device__ inline void gated_norm(float (&x)[4], const float (&weight)[4], const float (&z)[4],
                                  float eps) {
    float squares = 0.0f;
#pragma unroll
    for (int i = 0; i < 4; ++i) squares += x[i] * x[i];
    const float scale = 1.0f / sqrtf(warp_sum(squares) / HEAD + eps);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = round_act(round_act(x[i] * scale) * weight[i]) * silu(z[i]);
}
