"""Packing a second time, by the specification's tables and row by row, to check the loader's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

Tensors = dict[str, np.ndarray]


def read_tensors(directory: Path) -> Tensors:
    """Every tensor of the checkpoint by the safetensors library, names without the prefix."""
    tensors: Tensors = {}
    for path in directory.glob("*.safetensors"):
        for name, value in load_file(path).items():
            tensors[name.removeprefix("model.").removeprefix("language_model.")] = value
    return tensors


def slow_packing(tensors: Tensors, config: dict[str, Any]) -> dict[str, np.ndarray]:
    """Path in `ModelWeights` -> expected fp32 array, one row at a time where rows are permuted."""
    fp32 = {name: value.astype(np.float32) for name, value in tensors.items()}
    packed = {"embed": fp32["embed_tokens.weight"], "norm": fp32["norm.weight"]}
    tied = config["tie_word_embeddings"]
    packed["lm_head"] = packed["embed"] if tied else fp32["lm_head.weight"]
    for i, kind in enumerate(config["layer_types"]):
        own = {n.removeprefix(f"layers.{i}."): t for n, t in fp32.items() if f"layers.{i}." in n}
        layer = {
            "input_norm": own["input_layernorm.weight"],
            "post_attention_norm": own["post_attention_layernorm.weight"],
            "mlp.gate_up": [*own["mlp.gate_proj.weight"], *own["mlp.up_proj.weight"]],
            "mlp.down": own["mlp.down_proj.weight"],
        }
        if kind == "full_attention":
            own = {name.removeprefix("self_attn."): value for name, value in own.items()}
            query, gate = [], []
            for row in range(len(own["q_proj.weight"])):
                place = row % (2 * config["head_dim"])
                half = query if place < config["head_dim"] else gate
                half.append(own["q_proj.weight"][row])
            layer |= {
                "mixer.qgkv": [*query, *gate, *own["k_proj.weight"], *own["v_proj.weight"]],
                "mixer.q_norm": own["q_norm.weight"],
                "mixer.k_norm": own["k_norm.weight"],
                "mixer.out": own["o_proj.weight"],
            }
        else:
            own = {name.removeprefix("linear_attn."): value for name, value in own.items()}
            layer |= {
                "mixer.qkvzba": [
                    *own["in_proj_qkv.weight"],
                    *own["in_proj_z.weight"],
                    *own["in_proj_b.weight"],
                    *own["in_proj_a.weight"],
                ],
                "mixer.conv": own["conv1d.weight"][:, 0],
                "mixer.a_log": own["A_log"],
                "mixer.dt_bias": own["dt_bias"],
                "mixer.norm": own["norm.weight"],
                "mixer.out": own["out_proj.weight"],
            }
        packed |= {f"layers.{i}.{name}": np.array(value) for name, value in layer.items()}
    return packed


def flatten(tree: Any, path: str = "") -> dict[str, Any]:
    """Path -> array of a backend."""
    if isinstance(tree, tuple):
        items = {str(i): item for i, item in enumerate(tree)}
    elif dataclasses.is_dataclass(tree):
        items = {f.name: getattr(tree, f.name) for f in dataclasses.fields(tree)}
    else:
        return {path.removesuffix("."): tree}
    return {
        k: v for name, item in items.items() for k, v in flatten(item, f"{path}{name}.").items()
    }


def assert_equal_weights(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        assert found[name].dtype == np.float32, name
        assert found[name].flags.c_contiguous, name
        np.testing.assert_array_equal(found[name], array, err_msg=name)
