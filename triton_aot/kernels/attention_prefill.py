"""Causal attention of prompt tokens over the paged cache, with the output gate.

    out = softmax(q k^T / sqrt(D)) v  >act  * (sigmoid(gate) >act)  >act

    q       act [T, NQ, D]                    qgkv   act [T, (2 NQ + 2 NKV) * D], gate heads second
    caches  act [rows, D], which is [blocks, NKV, block_size, D]; block_size a multiple of TILE_N
    out     act [T, NQ * D]

Row t of sequence b is at position start_positions[b] + t - cu_seqlens[b] and attends to positions
up to its own, in tiles of TILE_N cut at absolute positions, in ascending order. A row's sums do not
see the other rows of its program: a tile beyond its position leaves its maximum, sum and
accumulator as they are, bit for bit. Block-table entries beyond the last row's position are not
read; in its last block, rows of V beyond it may hold anything, so they are replaced by zeros.

Method: online softmax in tiles (Dao, "FlashAttention-2", 2023). Formula: spec section 3.4.
Check: tests/test_triton_attention.py (interpreter), tools/gpu_check.py --only attention_prefill.
"""

import triton
import triton.language as tl

from .varlen import sequence_of_tile


@triton.jit
def cache_row(table, position, kv_head, NKV, BLOCK_SIZE):
    block = tl.load(table + position // BLOCK_SIZE)
    return (block * NKV + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE


@triton.jit
def attention_prefill_kernel(
    q,
    qgkv,
    k_cache,
    v_cache,
    block_tables,
    cu_seqlens,
    start_positions,
    state_slots,
    out,
    NUM_SEQS,
    NQ,
    NKV,
    CACHE_ROWS,
    BLOCK_SIZE,
    MAX_BLOCKS,
    D: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
):
    """Grid (NQ, T // TILE_M + B): the query heads of a KV head side by side, long rows first."""
    head = tl.program_id(0)
    index = tl.num_programs(1) - 1 - tl.program_id(1)
    b, tile = sequence_of_tile(cu_seqlens, NUM_SEQS, index, TILE_M, 1)
    begin = tl.load(cu_seqlens + b)
    end = tl.load(cu_seqlens + b + 1)
    first_token = begin + tile * TILE_M
    if first_token >= end:
        return
    start = tl.load(start_positions + b)
    table = block_tables + tl.load(state_slots + b).to(tl.int64) * MAX_BLOCKS
    kv_head = head // (NQ // NKV)

    tokens = tl.minimum(first_token + tl.arange(0, TILE_M), end - 1)  # past the end: the last again
    rows = start + tokens - begin
    first_row = start + first_token - begin
    last = tl.minimum(first_row + TILE_M, start + end - begin) - 1
    dims = tl.arange(0, D)
    q_tile = tl.load(q + (tokens.to(tl.int64) * NQ + head)[:, None] * D + dims[None, :])

    # Of the last tile, rows of V beyond `last` come as zeros: they lie past the end of `v_tail`.
    k_desc = tl.make_tensor_descriptor(k_cache, [CACHE_ROWS, D], [D, 1], [TILE_N, D])
    v_desc = tl.make_tensor_descriptor(v_cache, [CACHE_ROWS, D], [D, 1], [TILE_N, D])
    tail_rows = cache_row(table, last, kv_head, NKV, BLOCK_SIZE) + 1
    v_tail = tl.make_tensor_descriptor(v_cache, [tail_rows, D], [D, 1], [TILE_N, D])
    SCALE: tl.constexpr = 1.4426950408889634 / D**0.5  # scores in units of log2
    acc = tl.zeros((TILE_M, D), tl.float32)
    largest = tl.full((TILE_M,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)

    # One loop, masked throughout: where the accumulator goes from one loop to another, ptxas runs
    # the matrix instructions of both one after the other, which costs more.
    for first in range(0, last + 1, TILE_N):
        row = cache_row(table, first, kv_head, NKV, BLOCK_SIZE)
        scores = tl.dot(q_tile, k_desc.load([row, 0]).T)
        seen = tl.arange(0, TILE_N)[None, :] <= (rows - first)[:, None]
        scores = tl.where(seen, scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        weights = tl.exp2((scores - new_largest[:, None]) * SCALE)
        decay = tl.exp2((largest - new_largest) * SCALE)
        total = total * decay + tl.sum(weights, 1)
        largest = new_largest
        v_of_tile = v_desc
        if first + TILE_N > last:
            v_of_tile = v_tail
        v = v_of_tile.load([row, 0])
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None])

    # Computed again from a value that is read again: kept, they would take registers in the loop.
    tokens = tl.load(cu_seqlens + b, volatile=True) + tile * TILE_M + tl.arange(0, TILE_M)
    present = tokens < end
    act: tl.constexpr = out.dtype.element_ty
    wide = tl.minimum(tokens, end - 1).to(tl.int64)
    gate_row = wide * (2 * NQ + 2 * NKV) + NQ + head
    gate = tl.load(qgkv + gate_row[:, None] * D + dims[None, :]).to(tl.float32)
    gate = (1.0 / (1.0 + tl.exp(-gate))).to(act).to(tl.float32)
    attended = (acc / total[:, None]).to(act).to(tl.float32)
    target = out + (wide * NQ + head)[:, None] * D + dims[None, :]
    tl.store(target, (attended * gate).to(act), mask=present[:, None])
