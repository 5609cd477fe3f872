"""The activation buffers of a forward pass, allocated once and sliced to the rows of each pass.

Weights and caches live elsewhere. A decode pass and a prefill pass run one after the other and
share the same memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ..config import ModelConfig
from ..ops.base import Ops

Array = Any


class Memory(Protocol):
    """What allocation needs of a `Device`."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array: ...

    def upload(self, host: Any) -> Array: ...


@dataclass(frozen=True)
class Buffers:
    """For up to `max_tokens` rows a pass; the flat ones are shared by layers of different widths.

    residual, hidden, branch  act  [T, H]   the stream; a block's normed input; its output
    projected                 act  flat     qkvzba [T, ...] or qgkv [T, ...]
    mixed                     act  flat     convolved qkv [T, C] or rotated q [T, NQ, D]
    mixer_out                 act  flat     [T, HV*V] or [T, NQ*D], before the out projection
    mlp                       act  [T, F]
    partials                  fp32 flat     [S, B, H], decode
    last_hidden               act  [B, H]   rows whose logits are wanted, prefill
    inv_freq                  fp32 [R/2]    a constant: theta^(-2i/R)
    """

    residual: Array
    hidden: Array
    branch: Array
    projected: Array
    mixed: Array
    mixer_out: Array
    mlp: Array
    partials: Array
    last_hidden: Array
    inv_freq: Array


def allocate_buffers(
    config: ModelConfig,
    ops: Ops,
    device: Memory,
    *,
    max_tokens: int,
    max_rows: int,
    act_dtype: Any,
) -> Buffers:
    """`max_tokens`: prompt tokens of a step; `max_rows`: decode rows of a step, and the most prompt
    rows of a step whose logits are wanted (`num_state_slots`)."""
    tokens, hidden = max(max_tokens, max_rows), config.hidden_size
    query_size = config.num_query_heads * config.head_dim
    out_size = max(config.value_size, query_size)
    segments = max(
        ops.num_segments(hidden, width)
        for width in (config.value_size, query_size, config.intermediate_size)
    )

    def act(*shape: int) -> Array:
        return device.empty(shape, act_dtype)

    return Buffers(
        residual=act(tokens, hidden),
        hidden=act(tokens, hidden),
        branch=act(tokens, hidden),
        projected=act(tokens * max(config.linear_in_size, config.attention_in_size)),
        mixed=act(tokens * max(config.conv_channels, query_size)),
        mixer_out=act(tokens * out_size),
        mlp=act(tokens, config.intermediate_size),
        partials=device.empty((segments * max_rows * hidden,), "float32"),
        last_hidden=act(max_rows, hidden),
        inv_freq=device.upload(rope_inv_freq(config)),
    )


def rope_inv_freq(config: ModelConfig) -> np.ndarray[Any, np.dtype[np.float32]]:
    """theta^(-2i/R), i = 0 .. R/2 - 1, fp32 (spec 1.3: R is the rotary dims, not the head's)."""
    exponents = np.arange(0, config.rotary_dim, 2, dtype=np.float32) / np.float32(config.rotary_dim)
    return np.float32(1) / np.power(np.float32(config.rope_theta), exponents)


def rows(flat: Array, *shape: int) -> Array:
    """The first elements of a flat buffer, as `shape`."""
    size = 1
    for length in shape:
        size *= length
    return flat[:size].reshape(shape)
