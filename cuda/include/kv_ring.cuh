// How decode attention brings paged K and V to a warp: a ring of slots in shared memory, each for
// the K or the V of one group of tokens, copied as whole rows of 512 bytes, ahead of their use.
#pragma once

#include "async_copy.cuh"
#include "decode_work.cuh"

constexpr int D = 256;            // of a head
constexpr int GROUP = 16;         // tokens
constexpr int WARPS = 4;          // of a block, which take the groups of an item in turn
constexpr int CHUNKS = D / 8;     // 16-byte pieces of a token's K or V: one a lane
constexpr int STRIDE = WARPS * GROUP;  // tokens from a warp's group to its next one
static_assert(CHUNKS == WARP);
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200)
constexpr int SLOTS = 2;  // of a warp, in 99 KiB
#else
constexpr int SLOTS = 3;
#endif

// Rows have gaps between them, so that no two chunks that a phase of a load takes are in the same banks:
// of K four chunks of two neighbouring tokens, of V two chunks of every second token.
constexpr int KEY_PITCH = CHUNKS + 4, VALUE_PITCH = CHUNKS + 1;

struct Slot {
    uint4 at[GROUP * KEY_PITCH];

    __device__ uint4& key(int token, int i) { return at[token * KEY_PITCH + i]; }
    __device__ uint4& value(int token, int i) { return at[token * VALUE_PITCH + i]; }
};

// The K or the V of a group: where its first row lies, and how many rows of D elements there are; 0
// after the last.
struct Rows {
    const bf16* from;
    int count;
    bool values;
};

struct PagedCache {
    const bf16 *k, *v;
    const int* block_tables;
    int NKV, block_size, max_blocks;

    __device__ int block(int slot, int position) const {
        return block_tables[static_cast<long long>(slot) * max_blocks + position / block_size];
    }
    // In elements, from the start of k or v.
    __device__ long long row(int block, int kv_head, int position) const {
        const long long head = static_cast<long long>(block) * NKV + kv_head;
        return (head * block_size + position % block_size) * D;
    }
};

// What a warp copies next: K, then V, group by group, through all items of its block. The item after
// the one at hand is known, and lane i knows the block of the i-th of up to 32 groups: no copy waits
// for where it comes from.
struct Loader {
    const PagedCache& cache;
    const WorkList& list;
    int index, step, warp, lane;
    Item item, next;
    int block, next_block;
    int token;     // of the group at hand
    bool values;   // V is next
    long long at;  // the group at hand

    __device__ Loader(const PagedCache& cache, const WorkList& list, int index, int step)
        : cache(cache), list(list), index(index), step(step), values(false), at(0) {
        warp = threadIdx.x / WARP;
        lane = threadIdx.x % WARP;
        item = list.at(index);
        token = first_token(item);
        block = blocks_from(item, token);
        find_next();
        skip_others_items();
    }

    // What is to be copied next.
    __device__ Rows take() {
        const int count = min(item.end - token, GROUP);
        if (count <= 0) return {nullptr, 0, false};
        if (!values) {
            const int group = (token - first_token(item)) / STRIDE;
            if (group > 0 && group % WARP == 0) block = blocks_from(item, token);
            const int own = __shfl_sync(ALL_LANES, block, group % WARP);
            at = cache.row(own, item.kv_head, token);
        }
        const Rows rows = {(values ? cache.v : cache.k) + at, count, values};
        if (values) {
            token += STRIDE;
            skip_others_items();
        }
        values = !values;
        return rows;
    }

private:
    __device__ int first_token(const Item& of) const { return of.begin + warp * GROUP; }
    __device__ int blocks_from(const Item& of, int first) const {
        const int position = first + lane * STRIDE;
        return position < of.end ? cache.block(of.slot, position) : 0;
    }
    __device__ void find_next() {
        index += step;
        next = list.at(index);
        next_block = blocks_from(next, first_token(next));
    }
    // A short split may have no group for this warp.
    __device__ void skip_others_items() {
        while (token >= item.end && item.exists()) {
            item = next;
            token = first_token(item);
            block = next_block;
            find_next();
        }
    }
};

// The slots of a warp in turn. Each is used by all lanes and then refilled. Rows that a group does not
// have are not read: its last one is, with weight 0.
struct Ring {
    Slot* slots;
#ifdef BULK_COPIES
    Barrier* filled;  // one a slot
    unsigned parities;    // of the phases that are next to be waited for, a bit a slot
#endif
    int current;

#ifdef BULK_COPIES
    __device__ Ring(Slot* slots, Barrier* filled)
        : slots(slots), filled(filled), parities(0), current(0) {
        if (threadIdx.x % WARP == 0) {
            for (int i = 0; i < SLOTS; ++i) init_barrier(filled + i, 1);
            publish_barriers();
        }
        __syncwarp();
    }
#else
    __device__ Ring(Slot* slots, Barrier*) : slots(slots), current(0) {}
#endif

    // What was loaded first, when it has come.
    __device__ Slot& wait() {
#ifdef BULK_COPIES
        wait_for(filled + current, parities >> current & 1);
        parities ^= 1u << current;
#else
        wait_copy_groups<SLOTS - 1>();
        __syncwarp();
#endif
        return slots[current];
    }

    // The slot at hand, which no lane uses any more, for what is to be loaded next.
    __device__ void refill(Loader& loader) {
        Slot& to = slots[current];
        const Rows rows = loader.take();
        const int lane = threadIdx.x % WARP;
#ifdef BULK_COPIES
        constexpr int ROW_BYTES = D * sizeof(bf16);
        if (rows.count > 0 && lane == 0) arrive_and_expect(filled + current, GROUP * ROW_BYTES);
        __syncwarp();
        if (rows.count > 0 && lane < GROUP) {
            copy_bulk(rows.values ? &to.value(lane, 0) : &to.key(lane, 0),
                      rows.from + min(lane, rows.count - 1) * D, ROW_BYTES, filled + current);
        }
#else
        __syncwarp();
        if (rows.count > 0) {
#pragma unroll
            for (int i = 0; i < GROUP; ++i) {
                const int row = rows.count == GROUP ? i : min(i, rows.count - 1);
                uint4& place = rows.values ? to.value(i, lane) : to.key(i, lane);
                copy_async_16(reinterpret_cast<bf16*>(&place), rows.from + row * D + lane * 8);
            }
        }
        end_copy_group();
#endif
        current = current + 1 == SLOTS ? 0 : current + 1;
    }

    // The same of a slot that lanes have written to.
    __device__ void refill_written(Loader& loader) {
#ifdef BULK_COPIES
        order_before_bulk_copies();
#endif
        refill(loader);
    }
};
