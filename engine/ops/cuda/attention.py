"""Full attention: cuda/qk_norm_rope_write.cu, cuda/attention_decode.cu, cuda/attention_combine.cu,
cuda/prepare_decode.cu and triton_aot/kernels/attention_prefill.py."""

from __future__ import annotations

from typing import Any

from ...forward_batch import DecodeBatch, PrefillBatch
from ..base import KV_TILE
from .kernels import Kernels

Array = Any

HEAD_DIM = 256
ROTARY_DIM = 64
MAX_SPLITS = 64
"""Splits of a row's context (cuda/include/decode_work.cuh)."""
MAX_DECODE_ROWS = 1023
"""Rows that prepare_decode, one block, can take."""

_HEADS = 4  # a block of qk_norm_rope_write
_WARP = 32
_COMBINE_THREADS = HEAD_DIM // 4
_BLOCKS_PER_MULTIPROCESSOR = 2  # attention_decode


class DecodeWork:
    """The work list of decode attention, which `prepare_decode` writes once a step and all layers
    read, and the partial results of its items. `empty(shape, dtype)` allocates."""

    def __init__(self, empty: Any, max_rows: int, num_query_heads: int) -> None:
        assert max_rows <= MAX_DECODE_ROWS, max_rows
        items = max_rows * MAX_SPLITS
        self.items = empty((items, 4), "int32")
        self.first_items = empty((max_rows + 1,), "int32")
        self.partial_out = empty((items, num_query_heads, HEAD_DIM), "float32")
        self.partial_stats = empty((items, num_query_heads, 2), "float32")


def prepare_decode(
    kernels: Kernels,
    batch: DecodeBatch,
    next_ids: Array,
    block_tables: Array,
    block_size: int,
    work: DecodeWork,
) -> None:
    rows = batch.num_rows
    assert rows < len(work.first_items)
    kernels.launch(
        "prepare_decode",
        (1, 1, 1),
        1024,
        batch.input_ids,
        batch.positions,
        batch.state_slots,
        batch.slot_mapping,
        next_ids,
        block_tables,
        work.items,
        work.first_items,
        rows,
        block_tables.shape[1],
        block_size,
    )


def qk_norm_rope_write(
    kernels: Kernels,
    qgkv: Array,
    q_norm: Array,
    k_norm: Array,
    eps: float,
    inv_freq: Array,
    positions: Array,
    slot_mapping: Array,
    q_out: Array,
    k_cache: Array,
    v_cache: Array,
) -> None:
    tokens, num_query_heads, head_dim = q_out.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    assert head_dim == HEAD_DIM and len(inv_freq) == ROTARY_DIM // 2
    heads = num_query_heads + 2 * num_kv_heads
    kernels.launch(
        "qk_norm_rope_write",
        (-(-heads // _HEADS), tokens, 1),
        _HEADS * _WARP,
        qgkv,
        q_norm,
        k_norm,
        eps,
        inv_freq,
        positions,
        slot_mapping,
        q_out,
        k_cache,
        v_cache,
        num_query_heads,
        num_kv_heads,
        block_size,
    )


def attention_decode(
    kernels: Kernels,
    q: Array,
    qgkv: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    batch: DecodeBatch,
    work: DecodeWork,
    out: Array,
) -> None:
    rows, num_query_heads, head_dim = q.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    assert head_dim == HEAD_DIM and block_size % 16 == 0
    assert num_query_heads // num_kv_heads <= 8
    kernels.launch(
        "attention_decode",
        (_BLOCKS_PER_MULTIPROCESSOR * kernels.num_multiprocessors, 1, 1),
        128,
        q,
        k_cache,
        v_cache,
        block_tables,
        work.items,
        work.first_items,
        work.partial_out,
        work.partial_stats,
        rows,
        num_query_heads,
        num_kv_heads,
        block_size,
        block_tables.shape[1],
    )
    kernels.launch(
        "attention_combine",
        (num_query_heads, rows, 1),
        _COMBINE_THREADS,
        work.partial_out,
        work.partial_stats,
        work.first_items,
        qgkv,
        out,
        num_query_heads,
        num_kv_heads,
    )


def attention_prefill(
    kernels: Kernels,
    q: Array,
    qgkv: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    batch: PrefillBatch,
    out: Array,
) -> None:
    tokens, num_query_heads, head_dim = q.shape
    blocks, num_kv_heads, block_size, _ = k_cache.shape
    assert head_dim == HEAD_DIM and block_size % KV_TILE == 0
    rows = kernels.constant("attention_prefill", "TILE_M")
    kernels.launch(
        "attention_prefill",
        (num_query_heads, tokens // rows + batch.num_seqs, 1),
        0,
        q,
        qgkv,
        k_cache,
        v_cache,
        block_tables,
        batch.cu_seqlens,
        batch.start_positions,
        batch.state_slots,
        out,
        batch.num_seqs,
        num_query_heads,
        num_kv_heads,
        blocks * num_kv_heads * block_size,
        block_size,
        block_tables.shape[1],
    )
