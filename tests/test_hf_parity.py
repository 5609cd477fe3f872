"""The engine's model against transformers, live (`make test-hf`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deltaserve.engine.ops.numpy import NumpyOps
from tests.model_cases import (
    CASES,
    SPLITS,
    STATE_TOLERANCE,
    TOLERANCE,
    Trace,
    golden,
    input_ids,
    load_golden,
    relative_error,
    rms_error,
    write_case,
)
from tests.model_harness import ModelHarness, load_case

pytestmark = pytest.mark.hf


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def directory(case: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(case)
    write_case(case, path)
    return path


@pytest.fixture(scope="module")
def expected(case: str, directory: Path) -> Trace:
    from tests.hf_model import hf_trace, load

    return hf_trace(load(directory), input_ids(case))


@pytest.fixture(scope="module")
def found(case: str, directory: Path) -> Trace:
    return ModelHarness(*load_case(directory)).trace(input_ids(case))


def test_prefill_logits(found: Trace, expected: Trace) -> None:
    assert expected.prefill.std() > 1  # the comparison can see something
    assert relative_error(found.prefill, expected.prefill) <= TOLERANCE
    assert (found.prefill.argmax(-1) == expected.prefill.argmax(-1)).all()


def test_decode_logits(found: Trace, expected: Trace) -> None:
    assert relative_error(found.decode, expected.decode) <= TOLERANCE


def test_carried_states(found: Trace, expected: Trace) -> None:
    errors = {k: relative_error(found.states[k], array) for k, array in expected.states.items()}
    assert max(errors.values()) <= STATE_TOLERANCE, errors


def test_prefill_in_odd_pieces(case: str, directory: Path, expected: Trace) -> None:
    harness = ModelHarness(*load_case(directory))
    logits = harness.prefill_in(0, input_ids(case), SPLITS)
    assert relative_error(logits, expected.prefill) <= TOLERANCE


def test_bf16_rounding_points(case: str, tmp_path: Path) -> None:
    """Halfway between what two orders of summation make of bf16 roundings, on CPUs with and without
    bf16 instructions, and the least that a missing rounding point makes of them (the one between
    weight and gate of the gated norm): A 2.8e-2 and 5.4e-2, B 0.6 and 2.3, C 0.8 and 2.1, D 1.0 and
    1.6."""
    import torch

    from tests.hf_model import hf_trace, load

    write_case(case, tmp_path, bf16=True)
    expected = hf_trace(load(tmp_path, torch.bfloat16), input_ids(case))
    config, weights = load_case(tmp_path, round_bf16=True)
    found = ModelHarness(config, weights, NumpyOps(round_bf16=True)).trace(input_ids(case))
    limit = {"A": 3.9e-2, "B": 1.2e-2, "C": 1.3e-2, "D": 1.25e-2}[case]
    assert rms_error(found.prefill, expected.prefill) <= limit
    assert rms_error(found.decode, expected.decode) <= limit


def test_golden_file_is_what_transformers_computes(case: str, expected: Trace) -> None:
    """Not to the bit: torch picks other kernels on other machines."""
    stored, fresh = load_golden(case), golden(expected)
    assert stored.keys() == fresh.keys()
    for name, array in fresh.items():
        if array.dtype == np.int16:
            assert (stored[name] == array).all(), name
        else:
            assert relative_error(stored[name], array) <= TOLERANCE, name
