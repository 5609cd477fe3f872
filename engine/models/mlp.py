"""The SwiGLU block: down(silu(gate(x)) * up(x))."""

from __future__ import annotations

from typing import Any

from ..ops.base import Ops
from .buffers import Buffers, views
from .weights_layout import MlpWeights

Array = Any


def mlp_prefill(weights: MlpWeights, ops: Ops, buffers: Buffers, hidden: Array, out: Array) -> None:
    """hidden, out act [T, H]."""
    (gated,) = views(buffers.block, (hidden.shape[0], weights.down.shape[1]))
    ops.linear_silu_mul(hidden, weights.gate_up, gated)
    ops.linear(gated, weights.down, out)


def mlp_decode(
    weights: MlpWeights, ops: Ops, buffers: Buffers, hidden: Array, partials: Array
) -> None:
    """hidden act [B, H]; partials fp32 [S, B, H]."""
    (gated,) = views(buffers.block, (hidden.shape[0], weights.down.shape[1]))
    ops.linear_silu_mul_decode(hidden, weights.gate_up, gated)
    ops.linear_partials(gated, weights.down, partials)
