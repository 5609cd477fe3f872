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
def attend_tile(
    acc,
    largest,
    total,
    q,
    k_desc,
    v_desc,
    row,
    first,
    rows,
    last,
    SCALE: tl.constexpr,
    MASK: tl.constexpr,
):
    """One KV tile whose first position is `first`; `row` is its first row in the cache arrays,
    `rows` the positions of the query rows, `last` that of the last one."""
    TILE_N: tl.constexpr = k_desc.block_shape[0]
    k = k_desc.load([row, 0])
    scores = tl.dot(q, k.T)
    if MASK:
        positions = first + tl.arange(0, TILE_N)
        scores = tl.where(positions[None, :] <= rows[:, None], scores, float("-inf"))
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    # Subtracted first, scaled second: scaled first, the compiler would fuse the two where no mask
    # stands between them, and a row's bits would depend on which of the two loops it is in.
    weights = tl.exp2((scores - new_largest[:, None]) * SCALE)
    decay = tl.exp2((largest - new_largest) * SCALE)
    total = total * decay + tl.sum(weights, 1)
    v = v_desc.load([row, 0])
    if MASK:
        v = tl.where((positions <= last)[:, None], v, 0.0).to(v.dtype)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None])
    return acc, new_largest, total


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

    tokens = first_token + tl.arange(0, TILE_M)
    present = tokens < end
    tokens = tl.minimum(tokens, end - 1)  # rows past the end repeat the last one
    rows = start + tokens - begin
    first_row = start + first_token - begin
    last = tl.minimum(first_row + TILE_M, start + end - begin) - 1
    dims = tl.arange(0, D)
    q_tile = tl.load(q + (tokens.to(tl.int64) * NQ + head)[:, None] * D + dims[None, :])

    k_desc = tl.make_tensor_descriptor(k_cache, [CACHE_ROWS, D], [D, 1], [TILE_N, D])
    v_desc = tl.make_tensor_descriptor(v_cache, [CACHE_ROWS, D], [D, 1], [TILE_N, D])
    SCALE: tl.constexpr = 1.4426950408889634 / D**0.5  # scores in units of log2
    acc = tl.zeros((TILE_M, D), tl.float32)
    largest = tl.full((TILE_M,), float("-inf"), tl.float32)
    total = tl.zeros((TILE_M,), tl.float32)

    # Tiles that every row sees whole, then those that some row is inside or before.
    whole = (first_row + 1) // TILE_N * TILE_N
    for first in range(0, whole, TILE_N):
        row = (
            tl.load(table + first // BLOCK_SIZE) * NKV + kv_head
        ) * BLOCK_SIZE + first % BLOCK_SIZE
        acc, largest, total = attend_tile(
            acc, largest, total, q_tile, k_desc, v_desc, row, first, rows, last, SCALE, False
        )
    for first in range(whole, last + 1, TILE_N):
        row = (
            tl.load(table + first // BLOCK_SIZE) * NKV + kv_head
        ) * BLOCK_SIZE + first % BLOCK_SIZE
        acc, largest, total = attend_tile(
            acc, largest, total, q_tile, k_desc, v_desc, row, first, rows, last, SCALE, True
        )

    act: tl.constexpr = out.dtype.element_ty
    wide = tokens.to(tl.int64)
    gate_row = wide * (2 * NQ + 2 * NKV) + NQ + head
    gate = tl.load(qgkv + gate_row[:, None] * D + dims[None, :]).to(tl.float32)
    gate = (1.0 / (1.0 + tl.exp(-gate))).to(act).to(tl.float32)
    attended = (acc / total[:, None]).to(act).to(tl.float32)
    target = out + (wide * NQ + head)[:, None] * D + dims[None, :]
    tl.store(target, (attended * gate).to(act), mask=present[:, None])
