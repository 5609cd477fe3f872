"""cuda/sampling.cu, run on the CPU, against the NumPy op, with every feature a row may have."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest

from deltaserve.engine.forward_batch import LogitAdjustments, SampleBatch
from deltaserve.engine.ops.cuda.ops import CudaOps, OpsShape
from deltaserve.engine.ops.numpy.ops import NumpyOps
from tests.cuda_on_cpu import CpuKernels
from tests.sampling_cases import NUM_FAILING, Outputs, empty_outputs, random_case

REFERENCE = NumpyOps()


@pytest.fixture(scope="module")
def ops() -> CudaOps:
    shape = OpsShape(4, 2, 2, max_decode_rows=32, max_prefill_tokens=64)
    return CudaOps(CpuKernels(), shape, np.empty)


def run(
    ops: CudaOps | NumpyOps, logits: np.ndarray, batch: SampleBatch
) -> tuple[Outputs, LogitAdjustments]:
    """The outputs, and what the op made of the adjustments."""
    state = copy.deepcopy(batch.params.adjustments)
    params = dataclasses.replace(batch.params, adjustments=state)
    outputs = empty_outputs(len(batch.params.seed), len(batch.rows))
    ops.sample(logits, dataclasses.replace(batch, params=params), *outputs.arrays())
    assert state is not None
    return outputs, state


@pytest.mark.parametrize(
    ("rows", "vocab", "limit"), [(19, 1501, 1480), (6, 640, 640), (6, 337, 13)]
)
def test_the_kernels_do_what_the_reference_does(
    ops: CudaOps, rows: int, vocab: int, limit: int
) -> None:
    logits, batch = random_case(np.random.default_rng(rows), rows, vocab, limit)
    before = logits.copy()
    actual, counted = run(ops, logits, batch)
    np.testing.assert_array_equal(logits, before)
    expected, expected_state = run(REFERENCE, logits, batch)
    assert expected.ids[-NUM_FAILING:].tolist() == [-1, -2, -2]
    np.testing.assert_array_equal(actual.ids, expected.ids)
    np.testing.assert_array_equal(actual.next_ids, expected.next_ids)
    np.testing.assert_array_equal(actual.top_ids, expected.top_ids)
    np.testing.assert_allclose(actual.logprobs, expected.logprobs, rtol=1e-5)
    np.testing.assert_allclose(actual.top_logprobs, expected.top_logprobs, rtol=1e-5)
    for name, array in vars(expected_state).items():
        np.testing.assert_array_equal(getattr(counted, name), array, name)


def test_padding_rows_write_nothing(ops: CudaOps) -> None:
    logits, batch = random_case(np.random.default_rng(5), 4, 640, 600)
    alone, _ = run(ops, logits, batch)
    columns = {
        name: np.concatenate([getattr(batch, name), np.full(4, -1, np.int32)])
        for name in ("rows", "state_slots", "positions", "features", "mask_rows")
    }
    padded, _ = run(ops, logits, dataclasses.replace(batch, **columns))
    np.testing.assert_array_equal(padded.ids, [*alone.ids, *[-7] * 4])
    np.testing.assert_array_equal(padded.next_ids, alone.next_ids)
    assert (padded.top_ids[-4:] == -7).all()


def test_ids_beyond_the_likeliest_are_told_apart_by_radix(ops: CudaOps) -> None:
    """More equal ones than a block has threads, and a nucleus of most of a flat row."""
    rng = np.random.default_rng(6)
    logits, batch = random_case(rng, 4, 1501, 1501)
    logits[:] = np.float32(0.5)
    logits[3] += 0.3 * rng.standard_normal(1501, np.float32)
    batch.rows[:] = batch.state_slots[:] = np.arange(4)
    for name, values in (("temperature", 1), ("num_logprobs", 20), ("min_p", 0)):
        getattr(batch.params, name)[:] = values
    batch.params.top_k[:] = [0, 5, 5, 0]
    batch.params.top_p[:] = [0.5, 1.0, 0.5, 0.9]
    plain = dataclasses.replace(batch, features=np.zeros(4, np.int32), mask_rows=None, masks=None)
    actual, _ = run(ops, logits, plain)
    expected, _ = run(REFERENCE, logits, plain)
    np.testing.assert_array_equal(actual.ids, expected.ids)
    np.testing.assert_array_equal(actual.top_ids, expected.top_ids)
    assert (actual.ids > 20).any()
