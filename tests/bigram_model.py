"""A checkpoint whose logits are a table: the last token alone decides what comes next.

Every layer adds nothing (its weights are 0), the embedding is one-hot, and so `lm_head` holds the
table, divided by what the final norm multiplies with. What a sampling parameter does to the logits
can then be worked out by hand, and the whole product computes it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from .tiny_checkpoint import (
    nested_hf_config,
    text_tensor_shapes,
    tiny_hf_config,
    write_safetensors,
    write_tokenizer,
)

ELSEWHERE = -20.0
VOCAB = 320


def write_bigram_model(
    directory: Path,
    table: Mapping[int, Mapping[int, float]],
    generation_config: Mapping[str, object] | None = None,
) -> Path:
    """`table[token][next]` is a logit; what it does not name is ELSEWHERE. fp32, with tokenizer."""
    config = tiny_hf_config(
        dtype="float32",
        vocab_size=VOCAB,
        hidden_size=VOCAB,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        intermediate_size=16,
        max_position_embeddings=1024,
    )
    logits = logits_table(table)
    scale = 1 / math.sqrt(1 / VOCAB + config["rms_norm_eps"])
    tensors = {
        name: np.zeros(shape, np.float32) for name, shape in text_tensor_shapes(config).items()
    }
    tensors["embed_tokens.weight"] = np.eye(VOCAB, dtype=np.float32)
    tensors["lm_head.weight"] = np.ascontiguousarray((logits.T / scale).astype(np.float32))
    prefix = "model.language_model."
    directory.mkdir(parents=True, exist_ok=True)
    write_safetensors(
        directory / "model.safetensors",
        {name if name == "lm_head.weight" else prefix + name: t for name, t in tensors.items()},
    )
    (directory / "config.json").write_text(json.dumps(nested_hf_config(config)))
    if generation_config is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation_config))
    write_tokenizer(directory)
    return directory


def logits_table(table: Mapping[int, Mapping[int, float]]) -> np.ndarray:
    """[VOCAB, VOCAB]: row of the last token, column of the next."""
    logits = np.full((VOCAB, VOCAB), ELSEWHERE)
    for token, row in table.items():
        for next_token, value in row.items():
            logits[token, next_token] = value
    return logits
