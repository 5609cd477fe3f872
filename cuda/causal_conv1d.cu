// causal_conv1d over the prompt tokens of several sequences, and the conv state they leave.
//
//     out[t, c] = silu(sum_j weight[c, j] * x[t - 3 + j, c]  >act)  >act,  j = 0 .. 3
//     x: the first C columns of qkvzba act [T, projection]; weight act [C, 4]; out act [T, C]
//     conv_state act [slots, 4, C]: position p in row p % 4; positions before the call are read from
//     slot initial_slots[b] (-1: zeros), and are zeros before position 0
//
// Two kernels, because the tokens that read the old state and those whose values become the new one
// belong to different blocks. The second one writes the last 4 rows of each sequence to its slot,
// and those before each snapshot's position to the snapshot's.
// Grids: (ceil(C / 8 / threads), ceil(T / tokens)) and (ceil(C / 8 / threads), B).
// Formula: spec section 3.5. Check and time: tools/gpu_check.py --only conv
#include "delta_net.cuh"

constexpr int CHANNELS = 8;  // a thread
constexpr int AHEAD = 8;     // tokens whose loads are on their way at once

// A few units in the last place of fp32 off, which the rounding to act hides: the exact functions
// would take longer than the memory.
__device__ inline float fast_silu(float x) {
    constexpr float LOG2_E = 1.44269504f;
#ifdef CUDA_ON_CPU
    return x / (1.0f + expf(-x));
#else
    float power, inverse;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -LOG2_E));
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + power));
    return x * inverse;
#endif
}

// 8 channels of a token as they lie in memory, and as floats. Two values are packed by one
// instruction, where each by itself would go through the unit that also computes ex2 and rcp.
struct alignas(16) Channels {
    unsigned pairs[CHANNELS / 2];
};

__device__ inline unsigned pack(float x, float y) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(x, y);
    return *reinterpret_cast<const unsigned*>(&pair);
}
__device__ inline float low(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ inline float high(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ inline void unpack(const Channels& from, float (&to)[CHANNELS]) {
#pragma unroll
    for (int i = 0; i < CHANNELS / 2; ++i) {
        to[2 * i] = low(from.pairs[i]);
        to[2 * i + 1] = high(from.pairs[i]);
    }
}

// The sequence that token t belongs to.
__device__ inline int sequence_of(const int* cu_seqlens, int B, int t) {
    int low = 0, high = B - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (cu_seqlens[middle] <= t) low = middle; else high = middle - 1;
    }
    return low;
}

extern "C" __global__ void __launch_bounds__(128) causal_conv1d_kernel(
    const bf16* __restrict__ qkvzba, const bf16* __restrict__ weight,
    const int* __restrict__ cu_seqlens, const int* __restrict__ start_positions,
    const int* __restrict__ initial_slots, const bf16* __restrict__ conv_state,
    bf16* __restrict__ out, int T, int B, int C, int projection, int tokens) {
    wait_for_earlier_kernels();
    const int channel = (blockIdx.x * blockDim.x + threadIdx.x) * CHANNELS;
    if (channel >= C) return;
    float taps[CHANNELS][TAPS];
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i) load_floats(weight + (channel + i) * TAPS, taps[i]);

    const int begin = blockIdx.y * tokens, end = min(begin + tokens, T);
    const bf16* x = qkvzba + channel;
    int b = sequence_of(cu_seqlens, B, begin);
    for (int t = begin; t < end; ++b) {  // the part of the tile that is sequence b
        const int first = cu_seqlens[b], stop = min(end, cu_seqlens[b + 1]);
        const int slot = initial_slots[b], start = start_positions[b];
        const bf16* state = conv_state + static_cast<long long>(slot) * CONV_RING * C + channel;
        Channels rows[TAPS - 1 + AHEAD] = {};  // of tokens t - 3 .. t + AHEAD - 1
#pragma unroll
        for (int i = 0; i < TAPS - 1; ++i) {
            const int from = t - (TAPS - 1) + i, position = start + from - first;
            const bool inside = from >= first;
            const bf16* row = inside ? x + static_cast<long long>(from) * projection
                                     : state + (position & (CONV_RING - 1)) * C;
            if (inside || (position >= 0 && slot >= 0)) {
                rows[i] = *reinterpret_cast<const Channels*>(row);
            }
        }
        for (; t < stop; t += AHEAD) {
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {  // all on their way before the first is used
                const long long row = min(t + i, stop - 1);
                rows[TAPS - 1 + i] = *reinterpret_cast<const Channels*>(x + row * projection);
            }
            float window[TAPS][CHANNELS];
#pragma unroll
            for (int i = 0; i < TAPS - 1; ++i) unpack(rows[i], window[i]);
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                unpack(rows[TAPS - 1 + i], window[TAPS - 1]);
                Channels result;
#pragma unroll
                for (int c = 0; c < CHANNELS; c += 2) {
                    float sums[2];
#pragma unroll
                    for (int half = 0; half < 2; ++half) {
                        sums[half] = taps[c + half][0] * window[0][c + half];
#pragma unroll
                        for (int j = 1; j < TAPS; ++j) {
                            sums[half] = fmaf(taps[c + half][j], window[j][c + half], sums[half]);
                        }
                    }
                    const unsigned rounded = pack(sums[0], sums[1]);
                    result.pairs[c / 2] = pack(fast_silu(low(rounded)), fast_silu(high(rounded)));
                }
                bf16* to = out + static_cast<long long>(t + i) * C + channel;
                if (t + i < stop) *reinterpret_cast<Channels*>(to) = result;
#pragma unroll
                for (int j = 1; j < TAPS; ++j) {
#pragma unroll
                    for (int c = 0; c < CHANNELS; ++c) window[j - 1][c] = window[j][c];
                }
            }
#pragma unroll
            for (int i = 0; i < TAPS - 1; ++i) rows[i] = rows[AHEAD + i];
        }
        t = stop;
    }
}

extern "C" __global__ void __launch_bounds__(128) conv_state_update_kernel(
    const bf16* __restrict__ qkvzba, const int* __restrict__ cu_seqlens,
    const int* __restrict__ start_positions, const int* __restrict__ state_slots,
    const int* __restrict__ initial_slots, const int* __restrict__ snapshot_starts,
    const int* __restrict__ snapshot_positions, const int* __restrict__ snapshot_slots,
    bf16* conv_state, int C, int projection) {
    wait_for_earlier_kernels();
    const int channel = (blockIdx.x * blockDim.x + threadIdx.x) * CHANNELS, b = blockIdx.y;
    if (channel >= C) return;
    const int first = cu_seqlens[b], start = start_positions[b], initial = initial_slots[b];
    const auto row = [=](int slot, int position) {
        return reinterpret_cast<uint4*>(
            conv_state + (static_cast<long long>(slot) * CONV_RING + position % CONV_RING) * C +
            channel);
    };
    // The sequence's own slot last: it may be the initial one, whose rows the snapshots need.
    const int end = snapshot_starts[b + 1];
    for (int i = snapshot_starts[b]; i <= end; ++i) {
        const int slot = i < end ? snapshot_slots[i] : state_slots[b];
        const int last = i < end ? snapshot_positions[i] : start + cu_seqlens[b + 1] - first;
        uint4 rows[CONV_RING];
#pragma unroll
        for (int j = 0; j < CONV_RING; ++j) {  // all on their way before the first is stored
            const int position = last - CONV_RING + j;
            const long long t = first + position - start;
            rows[j] = make_uint4(0, 0, 0, 0);
            if (position < 0) continue;
            if (position >= start) {
                rows[j] = *reinterpret_cast<const uint4*>(qkvzba + t * projection + channel);
            } else if (initial >= 0 && slot != initial) {
                rows[j] = *row(initial, position);
            }
        }
#pragma unroll
        for (int j = 0; j < CONV_RING; ++j) {
            const int position = last - CONV_RING + j;
            const bool changes = position >= start || slot != initial;
            if (position >= 0 && changes) *row(slot, position) = rows[j];
        }
    }
}
