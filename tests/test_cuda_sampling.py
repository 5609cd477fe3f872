"""cuda/sampling.cu, run on the CPU, against the NumPy op, with every feature a row may have."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest

from deltaserve.engine.forward_batch import LogitAdjustments, SampleBatch
from deltaserve.engine.ops.cuda import sampling
from deltaserve.engine.ops.cuda.ops import CudaOps, OpsShape
from deltaserve.engine.ops.numpy.ops import NumpyOps
from tests.cuda_on_cpu import CpuKernels
from tests.sampling_cases import NUM_FAILING, Outputs, empty_outputs, random_case

REFERENCE = NumpyOps()


@pytest.fixture(scope="module")
def ops() -> CudaOps:
    shape = OpsShape(4, 2, max_decode_rows=32, max_prefill_tokens=64)
    return CudaOps(CpuKernels(), shape, np.empty)


def run(
    ops: CudaOps | NumpyOps, logits: np.ndarray, batch: SampleBatch
) -> tuple[Outputs, LogitAdjustments]:
    """The outputs, and what the op made of the adjustments."""
    state = copy.deepcopy(batch.params.adjustments)
    params = dataclasses.replace(batch.params, adjustments=state)
    outputs = empty_outputs(len(batch.params.seed), len(batch.rows))
    if isinstance(ops, CudaOps):
        for scratch in vars(ops._workspace.sample).values():
            scratch.fill(7)
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


def plain_batch(rng: np.random.Generator, rows: int, vocab: int) -> tuple[np.ndarray, SampleBatch]:
    """Normal logits, no features, temperature 1 and nothing else."""
    logits, batch = random_case(rng, rows, vocab, vocab)
    logits[:] = rng.standard_normal((rows, vocab), np.float32)
    batch.rows[:] = batch.state_slots[:] = np.arange(rows)
    params = batch.params
    for name, value in (("temperature", 1), ("top_p", 1), ("top_k", 0), ("min_p", 0)):
        getattr(params, name)[:] = value
    params.num_logprobs[:] = -1
    features = np.zeros(rows, np.int32)
    return logits, dataclasses.replace(batch, features=features, mask_rows=None, masks=None)


def test_a_nucleus_ends_in_a_digit_that_many_ids_share(ops: CudaOps) -> None:
    """Of flat rows, whose last digit has a few ids, or more than are listed; of the last
    six rows the likeliest id is at the end of it, and three times min_p within it."""
    logits, batch = plain_batch(np.random.default_rng(7), 12, 9001)
    logits *= np.array([3, 3, 0, 8, 1, 1, *[0.006] * 6], np.float32)[:, None]
    batch.params.top_p[:] = [0.9, 0.9, 0.7, 0.999, 0.5, 1.0, 2e-4, 3e-4, 5e-4, 0.05, 0.05, 0.05]
    batch.params.min_p[:] = [0, 0, 0, 0, 0.1, 0.5, 0, 0, 0, 0.999, 0.9995, 0.9999]
    batch.params.temperature[1] = 1e-35
    actual, _ = run(ops, logits, batch)
    expected, _ = run(REFERENCE, logits, batch)
    np.testing.assert_array_equal(actual.ids, expected.ids)


def test_the_sums_of_masses_are_the_same_by_segment_and_by_digit() -> None:
    shape = OpsShape(4, 2, max_decode_rows=8, max_prefill_tokens=64)
    ops = CudaOps(CpuKernels(), shape, np.empty)
    logits, batch = plain_batch(np.random.default_rng(8), 3, 5003)
    logits *= np.array([1, 5, 0], np.float32)[:, None]
    batch.params.num_logprobs[:] = 0
    run(ops, logits, batch)
    work = ops._workspace.sample
    sums = work.segment_masses[:3].sum(1)
    np.testing.assert_array_equal(work.raw_masses[:3].sum(1), sums)
    batch.params.top_p[:] = 0.5
    run(ops, logits, batch)
    np.testing.assert_array_equal(work.histograms[:3].sum(1), sums)
    weights = np.exp((logits - logits.max(1, keepdims=True)).astype(np.float64))
    # each weight may be off by an ulp or two, and is rounded down to 2**-40
    np.testing.assert_allclose(sums, 2.0**40 * weights.sum(1), rtol=3e-7)


def test_the_order_in_which_blocks_take_rows_changes_nothing(
    ops: CudaOps, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits, batch = random_case(np.random.default_rng(9), 8, 640, 600)
    batch.params.temperature[:] = 1
    one_each, _ = run(ops, logits, batch)
    monkeypatch.setattr(sampling, "MASS_BLOCKS", 3)
    several_each, _ = run(ops, logits, batch)
    for actual, expected in zip(several_each.arrays(), one_each.arrays(), strict=True):
        np.testing.assert_array_equal(actual, expected)
