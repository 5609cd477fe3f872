"""The arrays the model computes with, as the loader packs them. Shapes in `ops.base` letters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Array = Any


@dataclass(frozen=True)
class MlpWeights:
    gate_up: Array  # [2F, H]
    down: Array  # [H, F]


@dataclass(frozen=True)
class AttentionWeights:
    qgkv: Array  # [(2*NQ + 2*NKV) * D, H]: all q heads, all gate heads, k heads, v heads
    q_norm: Array  # [D]
    k_norm: Array  # [D]
    out: Array  # [H, NQ*D]


@dataclass(frozen=True)
class DeltaNetWeights:
    qkvzba: Array  # [C + HV*V + 2*HV, H]: q, k, v heads, then z, then b, then a
    conv: Array  # [C, 4]
    a_log: Array  # fp32 [HV]
    dt_bias: Array  # fp32 [HV]
    norm: Array  # fp32 [V]
    out: Array  # [H, HV*V]


@dataclass(frozen=True)
class LayerWeights:
    input_norm: Array  # [H]
    mixer: AttentionWeights | DeltaNetWeights
    post_attention_norm: Array  # [H]
    mlp: MlpWeights


@dataclass(frozen=True)
class ModelWeights:
    embed: Array  # [vocab, H]
    layers: tuple[LayerWeights, ...]
    norm: Array  # [H]
    lm_head: Array  # [vocab, H]; the same array as embed when tied
