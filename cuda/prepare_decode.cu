// prepare_decode: what a decode step needs before its first layer, for B < 1024 rows, in one block
// of 1024 threads.
//
//     input_ids[b]      next_ids[state_slots[b]] where it is -1
//     slot_mapping[b]   block_tables[state_slots[b], p / block_size] * block_size + p % block_size
//     work_items        [items, 4]: row, first position, context and slot of every split of every row's
//                       context, row by row
//     first_items[b]    the first work item of row b; first_items[B] is their number
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
    const int* next_ids, const int* block_tables, int* work_items, int* first_items, int B,
    int max_blocks, int block_size) {
    __shared__ int ends[1024];
    const int b = threadIdx.x;
    int splits = 0, slot = -1, context = 0, length = 0;
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
            splits = (context + length - 1) / length;
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
    const int first = ends[b] - splits;
    if (b <= B) first_items[b] = first;
    for (int split = 0; split < splits; ++split) {
        reinterpret_cast<WorkItem*>(work_items)[first + split] = {b, split * length, context, slot};
    }
}
