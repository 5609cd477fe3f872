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
// Grids: (ceil(C / 8 / threads), ceil(T / TOKENS)) and (ceil(C / 8 / threads), B).
// Formula: spec section 3.5. Check and time: tools/gpu_check.py --only conv
#include "delta_net.cuh"

constexpr int TOKENS = 16;
constexpr int CHANNELS = 8;  // a thread
constexpr int AHEAD = 8;     // tokens whose loads are on their way at once

// A few units in the last place of fp32 off, which the rounding to act hides: the exact functions
// would take longer than the memory.
__device__ inline float fast_silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

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
    bf16* __restrict__ out, int T, int B, int C, int projection) {
    wait_for_earlier_kernels();
    const int channel = (blockIdx.x * blockDim.x + threadIdx.x) * CHANNELS;
    if (channel >= C) return;
    float taps[CHANNELS][TAPS];
#pragma unroll
    for (int i = 0; i < CHANNELS; ++i) load_floats(weight + (channel + i) * TAPS, taps[i]);

    const int begin = blockIdx.y * TOKENS, end = min(begin + TOKENS, T);
    const bf16* x = qkvzba + channel;
    int b = sequence_of(cu_seqlens, B, begin);
    for (int t = begin; t < end; ++b) {  // the part of the tile that is sequence b
        const int first = cu_seqlens[b], stop = min(end, cu_seqlens[b + 1]);
        const int slot = initial_slots[b], start = start_positions[b];
        const bf16* state = conv_state + static_cast<long long>(slot) * CONV_RING * C + channel;
        float window[TAPS][CHANNELS] = {};  // of tokens t - 3 .. t, the last yet to come
#pragma unroll
        for (int back = 1; back < TAPS; ++back) {
            const int position = start + t - first - back;
            float (&row)[CHANNELS] = window[TAPS - 1 - back];
            if (t - back >= first) {
                load_floats(x + static_cast<long long>(t - back) * projection, row);
            } else if (position >= 0 && slot >= 0) {
                load_floats(state + (position % CONV_RING) * C, row);
            }
        }
        for (; t < stop; t += AHEAD) {
            Bf16Vector<CHANNELS> rows[AHEAD];  // all on their way before the first is used
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                const long long row = min(t + i, stop - 1);
                rows[i] = *reinterpret_cast<const Bf16Vector<CHANNELS>*>(x + row * projection);
            }
#pragma unroll
            for (int i = 0; i < AHEAD; ++i) {
                if (t + i >= stop) break;
                float result[CHANNELS];
#pragma unroll
                for (int c = 0; c < CHANNELS; ++c) {
                    window[TAPS - 1][c] = to_float(rows[i].at[c]);
                    float sum = taps[c][0] * window[0][c];
#pragma unroll
                    for (int j = 1; j < TAPS; ++j) sum = fmaf(taps[c][j], window[j][c], sum);
                    result[c] = fast_silu(round_act(sum));
#pragma unroll
                    for (int j = 1; j < TAPS; ++j) window[j - 1][c] = window[j][c];
                }
                store_act(result, out + static_cast<long long>(t + i) * C + channel);
            }
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
        for (int position = max(last - CONV_RING, 0); position < last; ++position) {
            const long long t = first + position - start;
            if (position >= start) {
                *row(slot, position) =
                    *reinterpret_cast<const uint4*>(qkvzba + t * projection + channel);
            } else if (slot != initial) {
                *row(slot, position) =
                    initial < 0 ? make_uint4(0, 0, 0, 0) : *row(initial, position);
            }
        }
    }
}
