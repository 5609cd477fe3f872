"""The activation buffers of a forward pass, allocated once and sliced to the rows of each pass.

Weights and caches live elsewhere. A decode pass and a prefill pass run one after the other and
share the same memory; so do the mixer and the MLP of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..config import ModelConfig
from ..ops.base import MAX_SEGMENTS

Array = Any

_ALIGN = 128
"""Views of the shared buffer start at multiples of this many elements."""


class Limits(Protocol):
    """What allocation needs of `Capacity`."""

    @property
    def num_state_slots(self) -> int: ...

    @property
    def max_num_batched_tokens(self) -> int: ...


class Memory(Protocol):
    """What allocation needs of `Device`."""

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array: ...

    def upload(self, host: Any) -> Array: ...


@dataclass(frozen=True)
class Buffers:
    """T rows are the most of any pass.

    residual, hidden, branch  act  [T, H]  the stream; a block's normed input; its output
    block                     act  flat    what a mixer or an MLP holds inside, by `views`
    partials                  fp32 flat    [S, B, H] of `linear_partials`, decode
    inv_freq                  fp32 [R/2]   a constant: theta^(-2i/R)
    """

    residual: Array
    hidden: Array
    branch: Array
    block: Array
    partials: Array
    inv_freq: Array


def allocate_buffers(
    config: ModelConfig, capacity: Limits, device: Memory, act_dtype: Any
) -> Buffers:
    """For steps of `max_num_batched_tokens` prompt tokens and `num_state_slots` decode rows."""
    tokens = max(capacity.max_num_batched_tokens, capacity.num_state_slots)
    hidden = config.hidden_size
    query_size = config.num_query_heads * config.head_dim
    delta_net = config.linear_in_size + config.conv_channels + config.value_size
    attention = config.attention_in_size + 2 * query_size
    width = max(delta_net, attention, config.intermediate_size)
    return Buffers(
        residual=device.empty((tokens, hidden), act_dtype),
        hidden=device.empty((tokens, hidden), act_dtype),
        branch=device.empty((tokens, hidden), act_dtype),
        block=device.empty((tokens * width + 3 * _ALIGN,), act_dtype),
        partials=device.empty((MAX_SEGMENTS * capacity.num_state_slots * hidden,), "float32"),
        inv_freq=device.upload(rope_inv_freq(config)),
    )


def rope_inv_freq(config: ModelConfig) -> npt.NDArray[np.float32]:
    """theta^(-2i/R), i = 0 .. R/2 - 1, fp32 (spec 1.3: R is the rotary dims, not the head's)."""
    exponents = np.arange(0, config.rotary_dim, 2, dtype=np.float32) / np.float32(config.rotary_dim)
    inv_freq: npt.NDArray[np.float32] = np.power(np.float32(config.rope_theta), -exponents)
    return inv_freq


def views(flat: Array, *shapes: tuple[int, ...]) -> list[Array]:
    """Arrays of these shapes, one after the other in a flat buffer."""
    found, start = [], 0
    for shape in shapes:
        end = start + prod(shape)
        found.append(flat[start:end].reshape(shape))
        start = -(-end // _ALIGN) * _ALIGN
    return found
