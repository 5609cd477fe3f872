"""The model on the NumPy backend against stored results of transformers (`tests/golden`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.model_cases import (
    CASES,
    FULL_ROWS,
    SPLITS,
    STATE_TOLERANCE,
    TOLERANCE,
    Trace,
    golden,
    input_ids,
    load_golden,
    relative_error,
    sketch,
    write_case,
)
from tests.model_harness import ModelHarness, load_case


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def stored(case: str) -> dict[str, np.ndarray]:
    return load_golden(case)


@pytest.fixture(scope="module")
def harness(case: str, tmp_path_factory: pytest.TempPathFactory) -> ModelHarness:
    directory: Path = tmp_path_factory.mktemp(case)
    write_case(case, directory)
    return ModelHarness(*load_case(directory), num_slots=3)


@pytest.fixture(scope="module")
def trace(harness: ModelHarness, case: str) -> Trace:
    return harness.trace(input_ids(case))


@pytest.fixture(scope="module")
def found(trace: Trace) -> dict[str, np.ndarray]:
    return golden(trace)


@pytest.mark.parametrize("name", ["prefill.rows", "prefill.sketch", "decode.rows", "decode.sketch"])
def test_logits(name: str, found: dict[str, np.ndarray], stored: dict[str, np.ndarray]) -> None:
    assert relative_error(found[name], stored[name]) <= TOLERANCE


@pytest.mark.parametrize("name", ["prefill.argmax", "decode.argmax"])
def test_likeliest_ids(
    name: str, found: dict[str, np.ndarray], stored: dict[str, np.ndarray]
) -> None:
    assert (found[name] == stored[name]).all()


def test_carried_states(found: dict[str, np.ndarray], stored: dict[str, np.ndarray]) -> None:
    names = [name for name in stored if name.startswith("state.")]
    assert names == [name for name in found if name.startswith("state.")]
    errors = {name: relative_error(found[name], stored[name]) for name in names}
    assert max(errors.values()) <= STATE_TOLERANCE, errors


def test_prefill_in_odd_pieces(
    harness: ModelHarness, case: str, stored: dict[str, np.ndarray]
) -> None:
    """Splits in the middle of a chunk are right, though not to the bit."""
    logits = harness.prefill_in(2, input_ids(case), SPLITS)
    assert relative_error(logits[FULL_ROWS], stored["prefill.rows"]) <= TOLERANCE
    assert relative_error(sketch(logits), stored["prefill.sketch"]) <= TOLERANCE
