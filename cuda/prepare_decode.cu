// prepare_decode: what a decode step needs before its first layer, for B < 1024 rows, in one block
// of 1024 threads.
//
//     input_ids[b]      next_ids[state_slots[b]] where it is -1
//     slot_mapping[b]   block_tables[state_slots[b], p / block_size] * block_size + p % block_size
//     work_items        [items, 4]: row, first position, context and slot of every split of every row's
//                       context: row by row, but those that are not of full length last, so that
//                       what is dealt out in turn comes out even
//     first_splits[b]    how many splits the rows before b have; first_splits[B] is the number of items
//
// A row whose slot is below 0 is padding: id -1, slot_mapping -1, no work items.
// Starts after all that is before it has ended, and nothing after it starts earlier than it ends: so
// later kernels of the step may read, before they wait for those between, what this one writes, the
// uploads before it, and whatever earlier steps wrote.
// int32 throughout; block_tables [slots, max_blocks]. Check: tools/gpu_check.py --only prepare
#include "common.cuh"
#include "decode_work.cuh"

extern "C" __global__ void __launch_bounds__(1024) prepare_decode_kernel(
    int* input_ids, const int* positions, const int* state_slots, int* slot_mapping,
    const int* next_ids, const int* block_tables, int* work_items, int* first_splits, int B,
    int max_blocks, int block_size) {
    constexpr int SHORT_ONE = 1 << 20;  // at most 64 * 1023 full ones
    __shared__ int ends[1024];
    const int b = threadIdx.x;
    int splits = 0, slot = -1, context = 0, length = 0;  // splits: full ones and short ones
    if (b < B) {
        const int position = positions[b];
        slot = state_slots[b];
        if (slot < 0) {
            input_ids[b] = slot_mapping[b] = -1;
        } else {
            if (input_ids[b] < 0) input_ids[b] = next_ids[slot];
            const int* table = block_tables + static_cast<long long>(slot) * max_blocks;
            slot_mapping[b] = table[position / block_size] * block_size + position % block_size;
            context = position + 1;
            length = split_length(context);
            splits = context / length + (context % length > 0) * SHORT_ONE;
        }
    }
    ends[b] = splits;
    __syncthreads();
    for (int step = 1; step < static_cast<int>(blockDim.x); step *= 2) {
        const int before = b >= step ? ends[b - step] : 0;
        __syncthreads();
        ends[b] += before;
        __syncthreads();
    }
    const int before = ends[b] - splits, all = ends[blockDim.x - 1];
    const int full = splits % SHORT_ONE, full_before = before % SHORT_ONE;
    if (b <= B) first_splits[b] = full_before + before / SHORT_ONE;
    WorkItem* items = reinterpret_cast<WorkItem*>(work_items);
    for (int split = 0; split < full; ++split) {
        items[full_before + split] = {b, split * length, context, slot};
    }
    if (splits >= SHORT_ONE) {
        items[all % SHORT_ONE + before / SHORT_ONE] = {b, full * length, context, slot};
    }
}
