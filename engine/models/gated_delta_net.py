"""The linear-attention mixer: short convolution, gated delta rule, gated norm."""

from __future__ import annotations

from typing import Any

from ..cache import DeltaNetCache
from ..config import ModelConfig
from ..forward_batch import DecodeBatch, PrefillBatch
from ..ops.base import Ops
from .buffers import Buffers, views
from .weights_layout import DeltaNetWeights

Array = Any


def delta_net_prefill(
    config: ModelConfig,
    weights: DeltaNetWeights,
    ops: Ops,
    cache: DeltaNetCache,
    buffers: Buffers,
    batch: PrefillBatch,
    hidden: Array,
    out: Array,
) -> None:
    """hidden, out act [T, H]."""
    tokens = batch.num_tokens
    qkvzba, qkv, mixed = views(
        buffers.block,
        (tokens, config.linear_in_size),
        (tokens, config.conv_channels),
        (tokens, config.value_size),
    )
    ops.linear(hidden, weights.qkvzba, qkvzba)
    ops.causal_conv1d(qkvzba, weights.conv, batch, cache.conv_state, qkv)
    ops.delta_rule_prefill(
        qkv, qkvzba, weights.a_log, weights.dt_bias, batch, cache.recurrent_state, mixed
    )
    ops.gated_rms_norm(mixed, qkvzba, weights.norm, config.rms_norm_eps, mixed)
    ops.linear(mixed, weights.out, out)


def delta_net_decode(
    config: ModelConfig,
    weights: DeltaNetWeights,
    ops: Ops,
    cache: DeltaNetCache,
    buffers: Buffers,
    batch: DecodeBatch,
    hidden: Array,
    partials: Array,
) -> None:
    """hidden act [B, H]; partials fp32 [S, B, H]."""
    rows = batch.num_rows
    qkvzba, mixed = views(buffers.block, (rows, config.linear_in_size), (rows, config.value_size))
    ops.linear_decode(hidden, weights.qkvzba, qkvzba)
    ops.delta_net_decode(
        qkvzba,
        weights.conv,
        weights.a_log,
        weights.dt_bias,
        weights.norm,
        config.rms_norm_eps,
        batch,
        cache.conv_state,
        cache.recurrent_state,
        mixed,
    )
    ops.linear_partials(mixed, weights.out, partials)
