"""The small models that the engine is compared with transformers on, and how a comparison is made.

A case's weights and token ids come from a counter-based generator, so that a stored reference
(`tests/golden`, written by `tools/make_golden.py`) holds results alone. Norms, A_log and dt_bias
are random, there are several KV heads, and prompts are longer than three delta-rule chunks: what
fresh initial weights and short prompts hide shows here.

    A  2 value heads a key head, 2 query heads a KV head, K != V, 8 layers
    B  3 value heads a key head, 6 query heads a KV head, K != V, tied
    C  1 value head a key head, tied
    D  the head dims and linear-attention heads of the 4B and 9B models
"""

from __future__ import annotations

import json
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tests.tiny_checkpoint import text_tensor_shapes, tiny_hf_config, write_safetensors

GOLDEN = Path(__file__).parent / "golden"
PROMPT_TOKENS = 201
SPLITS = (1, 2, 37, 64, 65, 3, 29)
DECODE_START, DECODE_STEPS = 130, 40
TOLERANCE = 1e-4
"""fp32 noise of two orders of summation (specification, section 10)."""
STATE_TOLERANCE = 1e-3

_ROPE = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}

CASES: dict[str, dict[str, Any]] = {
    "A": {
        "num_hidden_layers": 8,
        "linear_num_value_heads": 4,
    },
    "B": {
        "num_attention_heads": 12,
        "tie_word_embeddings": True,
    },
    "C": {
        "linear_num_key_heads": 4,
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 16,
        "tie_word_embeddings": True,
    },
    "D": {
        "hidden_size": 64,
        "num_attention_heads": 8,
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "rope_parameters": {**_ROPE, "mrope_section": [11, 11, 10], "mrope_interleaved": True},
    },
}


def hf_config(case: str) -> dict[str, Any]:
    return tiny_hf_config(dtype="float32", **CASES[case])


def uniform(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Mean 0, variance 1, fp32; a function of `name` and the number of elements alone."""
    count = int(np.prod(shape))
    bits = np.random.Philox(key=zlib.crc32(name.encode())).random_raw(count)
    values = (bits >> np.uint64(40)).astype(np.float32) / np.float32(2**24) - np.float32(0.5)
    return (values * np.float32(12**0.5)).reshape(shape)


def tensors(case: str) -> dict[str, np.ndarray]:
    """The case's weights by Hugging Face name, without the prefix "model."."""
    return {
        name: _tensor(f"{case}.{name}", shape)
        for name, shape in text_tensor_shapes(hf_config(case)).items()
    }


def _tensor(name: str, shape: tuple[int, ...]) -> np.ndarray:
    values = uniform(name, shape)
    if name.endswith("A_log"):  # decays from about 1 to exp(-2) a token
        return np.log(np.float32(1.01) + values * np.float32(0.57))
    if name.endswith("dt_bias"):
        return values * np.float32(0.5) - np.float32(1)
    if name.endswith("linear_attn.norm.weight"):
        return values * np.float32(0.2) + np.float32(1)
    if name.endswith("norm.weight"):
        return values * np.float32(0.2)
    if name.endswith("conv1d.weight"):
        return values * np.float32(0.5)
    scale = 3.0 if name.endswith(("lm_head.weight", "embed_tokens.weight")) else 1.0
    return values * np.float32(scale / np.sqrt(shape[-1]))


def input_ids(case: str) -> list[int]:
    vocab = hf_config(case)["vocab_size"]
    bits = np.random.Philox(key=zlib.crc32(f"{case}.ids".encode())).random_raw(PROMPT_TOKENS)
    return (bits % np.uint64(vocab)).astype(int).tolist()


def write_case(case: str, directory: Path, *, bf16: bool = False) -> None:
    """A checkpoint in Hugging Face layout; `bf16` rounds all weights, as transformers does to the
    ones that Qwen3.5 stores in fp32 too when it loads a model in bf16."""
    (directory / "config.json").write_text(json.dumps(hf_config(case)))
    named = {
        name if name == "lm_head.weight" else f"model.{name}": (
            array.astype(ml_dtypes.bfloat16) if bf16 else array
        )
        for name, array in tensors(case).items()
    }
    write_safetensors(directory / "model.safetensors", named)


@dataclass
class Trace:
    """What a model computes for a case's ids.

    prefill [201, vocab]: all tokens as a prompt. decode [40, vocab]: the first 130 as a prompt,
    then 40 one by one; `states` is what is carried after those 170, by "layer.name": recurrent
    [HV, K, V], conv [3, C] (oldest first), k and v [NKV, 170, D].
    """

    prefill: np.ndarray
    decode: np.ndarray
    states: dict[str, np.ndarray] = field(default_factory=dict)


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """max|found - expected| / max|expected|; infinite where something is not finite."""
    difference = np.abs(found - expected).max() / np.abs(expected).max()
    return float(difference) if np.isfinite(difference) else np.inf


def rms_error(found: np.ndarray, expected: np.ndarray) -> float:
    difference = found.astype(np.float64) - expected
    return float(np.sqrt(np.mean(difference**2) / np.mean(expected.astype(np.float64) ** 2)))


def sketch(array: np.ndarray) -> np.ndarray:
    """Four fixed random projections of the last axis: every element counts in each."""
    signs = np.sign(uniform("sketch", (array.shape[-1], 4))).astype(np.float64)
    return (array @ signs).astype(np.float32)


FULL_ROWS = slice(0, None, 25)
"""Rows of the logits that a golden file holds whole; of the others it has the sketch."""


def golden(trace: Trace) -> dict[str, np.ndarray]:
    """What is stored of a reference trace."""
    arrays = {
        "prefill.rows": trace.prefill[FULL_ROWS],
        "prefill.sketch": sketch(trace.prefill),
        "prefill.argmax": trace.prefill.argmax(axis=-1).astype(np.int16),
        "decode.rows": trace.decode[FULL_ROWS],
        "decode.sketch": sketch(trace.decode),
        "decode.argmax": trace.decode.argmax(axis=-1).astype(np.int16),
    }
    return arrays | {f"state.{name}": sketch(array) for name, array in trace.states.items()}


def load_golden(case: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / f"{case}.npz") as file:
        return dict(file)
