"""The full-attention mixer: gated softmax attention with per-head q/k norms and partial RoPE."""

from __future__ import annotations

from typing import Any

from ..cache import AttentionCache
from ..config import ModelConfig
from ..forward_batch import DecodeBatch, PrefillBatch
from ..ops.base import Ops
from .buffers import Buffers, views
from .weights_layout import AttentionWeights

Array = Any


def attention_prefill(
    config: ModelConfig,
    weights: AttentionWeights,
    ops: Ops,
    cache: AttentionCache,
    block_tables: Array,
    buffers: Buffers,
    batch: PrefillBatch,
    hidden: Array,
    out: Array,
) -> None:
    """hidden, out act [T, H]."""
    qgkv, q, mixed = _views(config, buffers, batch.num_tokens)
    ops.linear(hidden, weights.qgkv, qgkv)
    _write(config, weights, ops, cache, buffers, batch, qgkv, q)
    ops.attention_prefill(q, qgkv, cache.k, cache.v, block_tables, batch, mixed)
    ops.linear(mixed, weights.out, out)


def attention_decode(
    config: ModelConfig,
    weights: AttentionWeights,
    ops: Ops,
    cache: AttentionCache,
    block_tables: Array,
    buffers: Buffers,
    batch: DecodeBatch,
    hidden: Array,
    partials: Array,
) -> None:
    """hidden act [B, H]; partials fp32 [S, B, H]."""
    qgkv, q, mixed = _views(config, buffers, batch.num_rows)
    ops.linear_decode(hidden, weights.qgkv, qgkv)
    _write(config, weights, ops, cache, buffers, batch, qgkv, q)
    ops.attention_decode(q, qgkv, cache.k, cache.v, block_tables, batch, mixed)
    ops.linear_partials(mixed, weights.out, partials)


def _views(config: ModelConfig, buffers: Buffers, tokens: int) -> list[Array]:
    heads, head_dim = config.num_query_heads, config.head_dim
    return views(
        buffers.block,
        (tokens, config.attention_in_size),
        (tokens, heads, head_dim),
        (tokens, heads * head_dim),
    )


def _write(
    config: ModelConfig,
    weights: AttentionWeights,
    ops: Ops,
    cache: AttentionCache,
    buffers: Buffers,
    batch: PrefillBatch | DecodeBatch,
    qgkv: Array,
    q: Array,
) -> None:
    ops.qk_norm_rope_write(
        qgkv,
        weights.q_norm,
        weights.k_norm,
        config.rms_norm_eps,
        buffers.inv_freq,
        batch.positions,
        batch.slot_mapping,
        q,
        cache.k,
        cache.v,
    )
