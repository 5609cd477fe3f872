"""The model against the straight-line reference of `tests/reference_qwen3_5.py`, on fresh random
weights: prompts of several sequences in one pass, splits, and decode steps of several rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.model_cases import TOLERANCE, hf_config, input_ids, load_golden, relative_error, tensors
from tests.model_harness import ModelHarness, load_case
from tests.reference_qwen3_5 import ReferenceModel
from tests.tiny_checkpoint import text_tensor_shapes, tiny_hf_config, write_checkpoint


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param({"num_hidden_layers": 5}, id="ends in a linear layer"),
        pytest.param(
            {
                "num_hidden_layers": 3,
                "layer_types": ["full_attention", "linear_attention", "full_attention"],
                "linear_num_value_heads": 4,
                "head_dim": 24,
                "num_attention_heads": 3,
                "num_key_value_heads": 1,
                "vocab_size": 97,
                "eos_token_id": 96,
                "intermediate_size": 33,
                "hidden_size": 50,
                "tie_word_embeddings": True,
            },
            id="widths that divide by nothing",
        ),
    ],
)
def test_batches_of_sequences(overrides: dict[str, object], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, dtype="float32", nested=False, seed=11, **overrides)
    config = tiny_hf_config(**overrides)
    reference = ReferenceModel(config, read_tensors(tmp_path, config))
    rng = np.random.default_rng(3)
    a, b, c = (rng.integers(0, config["vocab_size"], n).tolist() for n in (90, 70, 9))
    harness = ModelHarness(*load_case(tmp_path), num_slots=3)

    first = harness.prefill((2, a, 0, 64), (0, c, 0, 1), (1, b, 0, 70))
    second = harness.prefill((0, c, 1, 5), (2, a, 64, 86))
    steps = [harness.decode((2, a[86 + i], 86 + i), (0, c[5 + i], 5 + i)) for i in range(4)]

    found_a = [first[:64], second[4:], *(step[:1] for step in steps)]
    found_c = [first[64:65], second[:4], *(step[1:] for step in steps)]
    assert relative_error(np.concatenate(found_a), reference.logits(a)) <= TOLERANCE
    assert relative_error(first[65:], reference.logits(b)) <= TOLERANCE
    assert relative_error(np.concatenate(found_c), reference.logits(c)) <= TOLERANCE


def test_the_reference_agrees_with_transformers() -> None:
    """What makes it an oracle."""
    reference = ReferenceModel(hf_config("B"), tensors("B"))
    rows = load_golden("B")["prefill.rows"][:4]
    logits = reference.logits(input_ids("B")[:76])
    assert relative_error(logits[::25], rows) <= TOLERANCE


def read_tensors(directory: Path, config: dict[str, object]) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    stored = load_file(directory / "model.safetensors")
    return {
        name: stored[name if name == "lm_head.weight" else f"model.{name}"]
        for name in text_tensor_shapes(config)
    }
