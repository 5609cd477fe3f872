"""A sequence's logits and state have the same bits whatever runs beside it and however its prompt
is cut at multiples of 64; what the NumPy backend promises (`ops.base`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deltaserve.engine.config import ModelConfig
from deltaserve.engine.models.weights_layout import ModelWeights
from deltaserve.engine.ops.numpy import NumpyOps
from tests.model_harness import ModelHarness, load_case
from tests.tiny_checkpoint import write_checkpoint

LENGTHS = (150, 64, 1, 201, 17, 100, 2, 65)
STEPS = 3
MODELS = {
    "tiny": {},
    "odd": {
        "hidden_size": 50,
        "intermediate_size": 33,
        "linear_key_head_dim": 18,
        "linear_value_head_dim": 10,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 24,
        "vocab_size": 301,
    },
    "demo": {
        "hidden_size": 128,
        "intermediate_size": 304,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "tie_word_embeddings": True,
    },
}

Result = tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]


@pytest.fixture(scope="module", params=MODELS)
def model(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[ModelConfig, ModelWeights]:
    directory: Path = tmp_path_factory.mktemp("model")
    write_checkpoint(directory, dtype="float32", nested=False, seed=2, **MODELS[request.param])
    return load_case(directory)


@pytest.fixture(scope="module")
def prompts(model: tuple[ModelConfig, ModelWeights]) -> list[list[int]]:
    rng = np.random.default_rng(4)
    return [rng.integers(0, model[0].vocab_size, n + STEPS).tolist() for n in LENGTHS]


def harness_for(model: tuple[ModelConfig, ModelWeights], round_bf16: bool = False) -> ModelHarness:
    ops = NumpyOps(round_bf16=round_bf16)
    return ModelHarness(*model, ops, num_slots=len(LENGTHS), max_tokens=sum(LENGTHS))


@pytest.fixture(scope="module")
def alone(model: tuple[ModelConfig, ModelWeights], prompts: list[list[int]]) -> list[Result]:
    """(prompt logits, decode logits, state) of each prompt, each in a pass of its own."""
    harness = harness_for(model)
    results = []
    for slot, (ids, length) in enumerate(zip(prompts, LENGTHS, strict=True)):
        prefill = harness.prefill((slot, ids, 0, length))
        decode = [harness.decode((slot, ids[length + i], length + i)) for i in range(STEPS)]
        results.append((prefill, np.concatenate(decode), carried(harness, slot, length)))
    return results


def carried(harness: ModelHarness, slot: int, length: int) -> dict[str, np.ndarray]:
    """The states after the decode steps; the conv rows of a sequence shorter than the window
    include some that were never written."""
    states = harness.states(slot, length + STEPS)
    return {name: array for name, array in states.items() if length >= 3 or "conv" not in name}


def assert_same(found: Result, expected: Result) -> None:
    for mine, other in zip(found[:2], expected[:2], strict=True):
        np.testing.assert_array_equal(mine, other)
        assert np.isfinite(mine).all()
    for name, array in expected[2].items():
        np.testing.assert_array_equal(found[2][name], array, err_msg=name)


def decode_together(
    harness: ModelHarness, prompts: list[list[int]], order: list[int]
) -> list[list[np.ndarray]]:
    """STEPS steps with all sequences in one batch; each sequence's logits."""
    logits: list[list[np.ndarray]] = [[] for _ in prompts]
    for i in range(STEPS):
        rows = [(s, prompts[s][LENGTHS[s] + i], LENGTHS[s] + i) for s in order]
        for s, row in zip(order, harness.decode(*rows), strict=True):
            logits[s].append(row)
    return logits


@pytest.mark.parametrize("seed", [0, 1])
def test_sequences_together_as_alone(
    seed: int,
    model: tuple[ModelConfig, ModelWeights],
    prompts: list[list[int]],
    alone: list[Result],
) -> None:
    harness = harness_for(model)
    order = np.random.default_rng(seed).permutation(len(LENGTHS)).tolist()
    together = harness.prefill(*((s, prompts[s], 0, LENGTHS[s]) for s in order))
    bounds = np.cumsum([0] + [LENGTHS[s] for s in order])
    prefill = {s: together[bounds[i] : bounds[i + 1]] for i, s in enumerate(order)}
    decode = decode_together(harness, prompts, order)
    for s, length in enumerate(LENGTHS):
        found = (prefill[s], np.stack(decode[s]), carried(harness, s, length))
        assert_same(found, alone[s])


def test_prompts_in_pieces_of_64(
    model: tuple[ModelConfig, ModelWeights], prompts: list[list[int]], alone: list[Result]
) -> None:
    """Passes that each take 64 or 128 tokens of some sequences, in mixed order."""
    harness = harness_for(model)
    rng = np.random.default_rng(7)
    done = [0] * len(LENGTHS)
    found: list[list[np.ndarray]] = [[] for _ in LENGTHS]
    while any(d < n for d, n in zip(done, LENGTHS, strict=True)):
        open_ = [s for s, n in enumerate(LENGTHS) if done[s] < n]
        chosen = rng.permutation(open_)[: rng.integers(1, 4)].tolist()
        ends = [min(done[s] + 64 * int(rng.integers(1, 3)), LENGTHS[s]) for s in chosen]
        pieces = [(s, prompts[s], done[s], end) for s, end in zip(chosen, ends, strict=True)]
        logits = harness.prefill(*pieces)
        row = 0
        for s, end in zip(chosen, ends, strict=True):
            found[s].append(logits[row : row + end - done[s]])
            row += end - done[s]
            done[s] = end
    decode = decode_together(harness, prompts, list(range(len(LENGTHS))))
    for s, length in enumerate(LENGTHS):
        result = (np.concatenate(found[s]), np.stack(decode[s]), carried(harness, s, length))
        assert_same(result, alone[s])


def test_a_failed_sequence_does_not_reach_the_others(
    model: tuple[ModelConfig, ModelWeights], prompts: list[list[int]], alone: list[Result]
) -> None:
    """Caches start as NaN; besides, one sequence's state is NaN throughout."""
    harness = harness_for(model)
    harness.prefill(*((s, prompts[s], 0, LENGTHS[s]) for s in range(len(LENGTHS))))
    for layer in harness.cache.layers:
        if hasattr(layer, "recurrent_state"):
            layer.recurrent_state[3] = np.nan
    decode = decode_together(harness, prompts, list(range(len(LENGTHS))))
    assert np.isnan(decode[3][0]).all()
    for s in set(range(len(LENGTHS))) - {3}:
        np.testing.assert_array_equal(np.stack(decode[s]), alone[s][1])


def test_rounded_to_bf16_too(
    model: tuple[ModelConfig, ModelWeights], prompts: list[list[int]]
) -> None:
    one, many = harness_for(model, True), harness_for(model, True)
    slots = range(len(LENGTHS))
    many_logits = many.prefill(*((s, prompts[s], 0, LENGTHS[s]) for s in slots))
    one_logits = [one.prefill((s, prompts[s], 0, LENGTHS[s])) for s in slots]
    np.testing.assert_array_equal(many_logits, np.concatenate(one_logits))
    many_steps = decode_together(many, prompts, list(slots))
    for s in slots:
        step = one.decode((s, prompts[s][LENGTHS[s]], LENGTHS[s]))
        np.testing.assert_array_equal(step[0], many_steps[s][0])
