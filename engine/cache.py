"""The KV and state arrays. The one place that states their layouts; ids are owned elsewhere
(`block_manager`, `state_manager`).

    k, v              act  [blocks, NKV, block_size, D]   one pair per full-attention layer
    conv_state        act  [slots + snapshots, 4, C]      one per linear layer, ring by position % 4
    recurrent_state   fp32 [slots + snapshots, HV, K, V]  one per linear layer
    block_tables      i32  [slots, max_blocks]            shared by all layers
    next_ids          i32  [slots]                        the id sampled last for each slot

Slots below `Capacity.num_state_slots` are running sequences', those from there on snapshots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .capacity import Capacity
from .config import ModelConfig
from .device import Device
from .ops.base import CONV_RING

Array = Any


@dataclass(frozen=True)
class AttentionCache:
    k: Array
    v: Array


@dataclass(frozen=True)
class DeltaNetCache:
    conv_state: Array
    recurrent_state: Array


@dataclass(frozen=True)
class Cache:
    """`layers[i]` belongs to model layer i."""

    layers: tuple[AttentionCache | DeltaNetCache, ...]
    block_tables: Array
    next_ids: Array


def allocate_cache(
    config: ModelConfig, capacity: Capacity, device: Device, act_dtype: Any
) -> Cache:
    """Zeroed arrays for `capacity` (a slot is read as zeros at position 0, so no later zeroing)."""
    slots = capacity.num_state_slots
    states = slots + capacity.num_snapshots
    kv_shape = (capacity.num_blocks, config.num_kv_heads, capacity.block_size, config.head_dim)
    state_shape = (states, config.num_value_heads, config.key_head_dim, config.value_head_dim)
    layers: list[AttentionCache | DeltaNetCache] = []
    for kind in config.layer_types:
        if kind == "full_attention":
            layers.append(
                AttentionCache(device.zeros(kv_shape, act_dtype), device.zeros(kv_shape, act_dtype))
            )
        else:
            layers.append(
                DeltaNetCache(
                    device.zeros((states, CONV_RING, config.conv_channels), act_dtype),
                    device.zeros(state_shape, "float32"),
                )
            )
    max_blocks = capacity.blocks_for(capacity.max_model_len)
    return Cache(
        layers=tuple(layers),
        block_tables=device.zeros((slots, max_blocks), "int32"),
        next_ids=device.zeros((slots,), "int32"),
    )
