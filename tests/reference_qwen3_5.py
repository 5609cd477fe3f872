"""Qwen3.5 in a straight line: a second statement of the specification, for tests.

Reads a Hugging Face configuration and tensors by their Hugging Face names, and shares no code with
the engine: one token after the other, one head after the other, the delta rule in its recurrent
form, attention over plain lists of keys and values. Arithmetic is float64, so that a difference to
it is the other side's rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Tensors = Mapping[str, np.ndarray]


@dataclass
class LayerState:
    """What one layer carries from token to token."""

    recurrent: np.ndarray | None = None  # [HV, K, V]
    conv_rows: list[np.ndarray] = field(default_factory=list)  # the last three, oldest first
    keys: list[np.ndarray] = field(default_factory=list)  # [NKV, D] a token
    values: list[np.ndarray] = field(default_factory=list)


class ReferenceModel:
    """`tensors` without the prefix "model." (and `lm_head.weight` unless tied)."""

    def __init__(self, config: Mapping[str, Any], tensors: Tensors) -> None:
        self.config = config
        self.tensors = {name: array.astype(np.float64) for name, array in tensors.items()}

    def start(self) -> list[LayerState]:
        return [LayerState() for _ in self.config["layer_types"]]

    def logits(self, ids: list[int], states: list[LayerState] | None = None) -> np.ndarray:
        """[len(ids), vocab], continuing from `states`."""
        states = self.start() if states is None else states
        return np.stack([self.token(token, states) for token in ids])

    def token(self, token: int, states: list[LayerState]) -> np.ndarray:
        get, eps = self.tensors.__getitem__, self.config["rms_norm_eps"]
        x = get("embed_tokens.weight")[token]
        for index, kind in enumerate(self.config["layer_types"]):
            name = f"layers.{index}."
            y = norm_one_plus(x, get(name + "input_layernorm.weight"), eps)
            if kind == "full_attention":
                x = x + self.full_attention(y, name + "self_attn.", states[index])
            else:
                x = x + self.linear_attention(y, name + "linear_attn.", states[index])
            y = norm_one_plus(x, get(name + "post_attention_layernorm.weight"), eps)
            gate = get(name + "mlp.gate_proj.weight") @ y
            up = get(name + "mlp.up_proj.weight") @ y
            x = x + get(name + "mlp.down_proj.weight") @ (silu(gate) * up)
        head = "embed_tokens.weight" if self.config["tie_word_embeddings"] else "lm_head.weight"
        return get(head) @ norm_one_plus(x, get("norm.weight"), eps)

    def full_attention(self, y: np.ndarray, name: str, state: LayerState) -> np.ndarray:
        config, get, eps = self.config, self.tensors.__getitem__, self.config["rms_norm_eps"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        dim, position = config["head_dim"], len(state.keys)
        query_gate = (get(name + "q_proj.weight") @ y).reshape(heads, 2 * dim)
        keys = (get(name + "k_proj.weight") @ y).reshape(kv_heads, dim)
        values = (get(name + "v_proj.weight") @ y).reshape(kv_heads, dim)
        state.keys.append(
            np.stack(
                [
                    self.rotate(norm_one_plus(k, get(name + "k_norm.weight"), eps), position)
                    for k in keys
                ]
            )
        )
        state.values.append(values)
        outputs = []
        for head in range(heads):
            query, gate = query_gate[head, :dim], query_gate[head, dim:]
            query = self.rotate(norm_one_plus(query, get(name + "q_norm.weight"), eps), position)
            kv_head = head // (heads // kv_heads)
            scores = np.array([key[kv_head] @ query for key in state.keys]) / np.sqrt(dim)
            weights = np.exp(scores - scores.max())
            weights /= weights.sum()
            mixed = sum(w * v[kv_head] for w, v in zip(weights, state.values, strict=True))
            outputs.append(mixed * sigmoid(gate))
        return get(name + "o_proj.weight") @ np.concatenate(outputs)

    def rotate(self, x: np.ndarray, position: int) -> np.ndarray:
        """Pairs (i, i + R/2) of the first R dims."""
        rope = self.config["rope_parameters"]
        rotary = int(self.config["head_dim"] * rope["partial_rotary_factor"])
        half = rotary // 2
        # the model defines frequencies and angles in fp32
        frequency = np.float32(rope["rope_theta"]) ** np.float32(-2 * np.arange(half) / rotary)
        angle = (np.float32(position) * frequency.astype(np.float32)).astype(np.float64)
        first, second, rest = x[:half], x[half:rotary], x[rotary:]
        cos, sin = np.cos(angle), np.sin(angle)
        return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest])

    def linear_attention(self, y: np.ndarray, name: str, state: LayerState) -> np.ndarray:
        config, get = self.config, self.tensors.__getitem__
        key_heads, value_heads = config["linear_num_key_heads"], config["linear_num_value_heads"]
        key_dim, value_dim = config["linear_key_head_dim"], config["linear_value_head_dim"]
        row = get(name + "in_proj_qkv.weight") @ y
        taps = get(name + "conv1d.weight")[:, 0, :]
        window = [*([np.zeros_like(row)] * (3 - len(state.conv_rows))), *state.conv_rows, row]
        mixed = silu(sum(taps[:, j] * window[j] for j in range(4)))
        state.conv_rows = window[1:]
        size = key_heads * key_dim
        queries = mixed[:size].reshape(key_heads, key_dim)
        keys = mixed[size : 2 * size].reshape(key_heads, key_dim)
        values = mixed[2 * size :].reshape(value_heads, value_dim)
        z = (get(name + "in_proj_z.weight") @ y).reshape(value_heads, value_dim)
        beta = sigmoid(get(name + "in_proj_b.weight") @ y)
        step = np.logaddexp(0.0, get(name + "in_proj_a.weight") @ y + get(name + "dt_bias"))
        decay = np.exp(-np.exp(get(name + "A_log")) * step)
        if state.recurrent is None:
            state.recurrent = np.zeros((value_heads, key_dim, value_dim))
        outputs = []
        for head in range(value_heads):
            key_head = head // (value_heads // key_heads)
            query = unit(queries[key_head]) / np.sqrt(key_dim)
            key = unit(keys[key_head])
            matrix = state.recurrent[head] * decay[head]
            written = beta[head] * (values[head] - matrix.T @ key)
            matrix = matrix + np.outer(key, written)
            state.recurrent[head] = matrix
            read = matrix.T @ query
            read = read / np.sqrt(np.mean(read**2) + config["rms_norm_eps"])
            outputs.append(read * get(name + "norm.weight") * silu(z[head]))
        return get(name + "out_proj.weight") @ np.concatenate(outputs)


def norm_one_plus(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x**2) + eps) * (1 + weight)


def unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.sum(x**2) + 1e-6)


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def silu(x: np.ndarray) -> np.ndarray:
    return x * sigmoid(x)
