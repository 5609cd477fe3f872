"""Which Hugging Face tensors make up each array of `ModelWeights`, and where their rows go.

The one place that knows the checkpoint's names (specification, section 2) and the packing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .config import ModelConfig
from .models.weights_layout import (
    AttentionWeights,
    DeltaNetWeights,
    LayerWeights,
    MlpWeights,
    ModelWeights,
)

LM_HEAD = "lm_head.weight"


@dataclass(frozen=True)
class RowCopy:
    """Rows `source` .. `source + count` of a tensor go to rows `target` .. of a packed array."""

    source: int
    target: int
    count: int


@dataclass(frozen=True)
class Piece:
    """A tensor of the checkpoint; its first axis is the rows, `copies` covers them in order."""

    name: str
    shape: tuple[int, ...]
    copies: tuple[RowCopy, ...]


@dataclass(frozen=True)
class PackedArray:
    """An array of `ModelWeights`. `fp32`: on every backend, else the activation type."""

    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    fp32: bool = False


def packed_layout(config: ModelConfig, prefix: str) -> ModelWeights:
    """`ModelWeights` with a `PackedArray` in the place of each array (`prefix`: see
    `checkpoint.find_prefix`)."""
    embed = _stack([(f"{prefix}embed_tokens.weight", config.vocab_size)], config.hidden_size)
    lm_head = _stack([(LM_HEAD, config.vocab_size)], config.hidden_size)
    return ModelWeights(
        embed=embed,
        layers=tuple(
            _layer(config, kind, f"{prefix}layers.{i}.")
            for i, kind in enumerate(config.layer_types)
        ),
        norm=_vector(f"{prefix}norm.weight", config.hidden_size),
        lm_head=embed if config.tie_word_embeddings else lm_head,
    )


def map_arrays(layout: Any, leaf: Callable[[PackedArray], Any]) -> Any:
    """The same dataclasses and tuples with `leaf(array)` in the place of each PackedArray."""
    if isinstance(layout, PackedArray):
        return leaf(layout)
    if isinstance(layout, tuple):
        return tuple(map_arrays(item, leaf) for item in layout)
    fields = dataclasses.fields(layout)
    return type(layout)(**{f.name: map_arrays(getattr(layout, f.name), leaf) for f in fields})


def _layer(config: ModelConfig, kind: str, prefix: str) -> LayerWeights:
    hidden, mlp = config.hidden_size, config.intermediate_size
    gate_up = [(f"{prefix}mlp.gate_proj.weight", mlp), (f"{prefix}mlp.up_proj.weight", mlp)]
    return LayerWeights(
        input_norm=_vector(f"{prefix}input_layernorm.weight", hidden),
        mixer=(
            _attention(config, f"{prefix}self_attn.")
            if kind == "full_attention"
            else _delta_net(config, f"{prefix}linear_attn.")
        ),
        post_attention_norm=_vector(f"{prefix}post_attention_layernorm.weight", hidden),
        mlp=MlpWeights(
            gate_up=_stack(gate_up, hidden),
            down=_stack([(f"{prefix}mlp.down_proj.weight", hidden)], mlp),
        ),
    )


def _attention(config: ModelConfig, prefix: str) -> AttentionWeights:
    """q_proj has the query rows and then the gate rows of each head; packed, all query rows come
    first, then all gate rows, then k, then v."""
    hidden, heads, dim = config.hidden_size, config.num_query_heads, config.head_dim
    q_rows, kv_rows = heads * dim, config.num_kv_heads * dim
    q_proj = Piece(
        f"{prefix}q_proj.weight",
        (2 * q_rows, hidden),
        tuple(
            RowCopy((2 * head + part) * dim, part * q_rows + head * dim, dim)
            for head in range(heads)
            for part in (0, 1)  # query, gate
        ),
    )
    k_proj, v_proj = (
        Piece(f"{prefix}{name}.weight", (kv_rows, hidden), (RowCopy(0, target, kv_rows),))
        for name, target in (("k_proj", 2 * q_rows), ("v_proj", 2 * q_rows + kv_rows))
    )
    return AttentionWeights(
        qgkv=PackedArray((config.attention_in_size, hidden), (q_proj, k_proj, v_proj)),
        q_norm=_vector(f"{prefix}q_norm.weight", dim),
        k_norm=_vector(f"{prefix}k_norm.weight", dim),
        out=_stack([(f"{prefix}o_proj.weight", hidden)], q_rows),
    )


def _delta_net(config: ModelConfig, prefix: str) -> DeltaNetWeights:
    hidden, channels, heads = config.hidden_size, config.conv_channels, config.num_value_heads
    conv = Piece(f"{prefix}conv1d.weight", (channels, 1, 4), (RowCopy(0, 0, channels),))
    return DeltaNetWeights(
        qkvzba=_stack(
            [
                (f"{prefix}in_proj_qkv.weight", channels),
                (f"{prefix}in_proj_z.weight", config.value_size),
                (f"{prefix}in_proj_b.weight", heads),
                (f"{prefix}in_proj_a.weight", heads),
            ],
            hidden,
        ),
        conv=PackedArray((channels, 4), (conv,)),
        a_log=_vector(f"{prefix}A_log", heads, fp32=True),
        dt_bias=_vector(f"{prefix}dt_bias", heads, fp32=True),
        norm=_vector(f"{prefix}norm.weight", config.value_head_dim, fp32=True),
        out=_stack([(f"{prefix}out_proj.weight", hidden)], config.value_size),
    )


def _stack(tensors: list[tuple[str, int]], columns: int) -> PackedArray:
    """Matrices of `columns` columns, one below the other; (name, rows) each."""
    pieces = []
    total = 0
    for name, rows in tensors:
        pieces.append(Piece(name, (rows, columns), (RowCopy(0, total, rows),)))
        total += rows
    return PackedArray((total, columns), tuple(pieces))


def _vector(name: str, size: int, fp32: bool = False) -> PackedArray:
    return PackedArray((size,), (Piece(name, (size,), (RowCopy(0, 0, size),)),), fp32)
