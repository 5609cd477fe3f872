"""Log-probabilities of given ids: the NumPy op by definition, the CUDA kernel against it."""

from __future__ import annotations

import numpy as np
import pytest

from deltaserve.engine.forward_batch import SampleBatch, SampleParams
from deltaserve.engine.ops.numpy.ops import NumpyOps

OPS = NumpyOps()


def make_logits(rows: int, vocab: int, limit: int) -> np.ndarray:
    rng = np.random.default_rng(5)
    logits = (3 * rng.standard_normal((rows, vocab))).astype(np.float32)
    logits[:, ::3] = np.round(logits[:, ::3])  # ties
    logits[:, limit:] = 100.0  # never counted
    return logits


def outputs(rows: int) -> list[np.ndarray]:
    shapes = [((rows,), np.float32), ((rows,), np.int32)]
    shapes += [((rows, 20), np.int32), ((rows, 20), np.float32)]
    return [np.full(shape, -7, dtype) for shape, dtype in shapes]


def test_values_ranks_and_order_of_the_likeliest() -> None:
    logits, limit = make_logits(4, 310, 300), 300
    targets = np.array([0, 299, int(logits[2, :limit].argmax()), 12], np.int32)
    out = outputs(4)
    OPS.token_logprobs(logits, targets, limit, 20, *out)
    logprobs, ranks, top_ids, top_logprobs = out
    wide = logits[:, :limit].astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(1, keepdims=True))
    np.testing.assert_allclose(logprobs, expected[range(4), targets], rtol=1e-5)
    assert ranks[2] == np.sum(wide[2] == wide[2].max())
    assert list(ranks) == [np.sum(wide[i] >= wide[i, t]) for i, t in enumerate(targets)]
    for row in range(4):
        order = sorted(range(limit), key=lambda i: (-wide[row, i], i))
        assert list(top_ids[row]) == order[:20]
        np.testing.assert_allclose(top_logprobs[row], expected[row, order[:20]], rtol=1e-5)


def test_bits_are_those_of_sampling() -> None:
    rows, limit = 3, 300
    logits = make_logits(rows, 310, limit)
    slots = np.arange(rows, dtype=np.int32)
    zeros = np.zeros(rows, np.float32)
    params = SampleParams(
        temperature=zeros,
        top_p=zeros + 1,
        min_p=zeros,
        top_k=np.zeros(rows, np.int32),
        seed=np.zeros(rows, np.uint64),
        num_logprobs=np.full(rows, 20, np.int32),
    )
    batch = SampleBatch(slots, slots, slots, params, limit)
    ids, (logprobs, _, top_ids, top_logprobs) = np.zeros(rows, np.int32), outputs(rows)
    next_ids = np.zeros(rows, np.int32)
    OPS.sample(logits.copy(), batch, next_ids, ids, logprobs, top_ids, top_logprobs)
    own = outputs(rows)
    OPS.token_logprobs(logits, ids, limit, 20, *own)
    for sampled, mine in zip((logprobs, top_ids, top_logprobs), (own[0], *own[2:]), strict=True):
        np.testing.assert_array_equal(mine, sampled)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_has_rank_minus_one(bad: float) -> None:
    logits = make_logits(2, 310, 300)
    logits[0, 7] = bad
    logits[1, 305] = bad  # beyond the limit: of no concern
    out = outputs(2)
    OPS.token_logprobs(logits, np.array([1, 1], np.int32), 300, 0, *out)
    assert out[1][0] == -1
    assert out[1][1] >= 1


@pytest.mark.aot
@pytest.mark.parametrize(("vocab", "limit"), [(5001, 4999), (1500, 13), (1024, 1024)])
@pytest.mark.parametrize("num_top", [0, 3])
def test_the_kernel_repeats_the_reference(vocab: int, limit: int, num_top: int) -> None:
    from deltaserve.engine.ops.cuda.ops import CudaOps, OpsShape

    from .cuda_on_cpu import CpuKernels

    ops = CudaOps(CpuKernels(), OpsShape(12, 6, 8, 64), np.empty)
    rows = 4
    logits = make_logits(rows, vocab, limit)
    logits[1, : limit : max(1, limit // 5)] += 50  # large ones next to each other in one group
    logits[1, :limit:1024] += 60
    logits[3, 5] = np.nan
    targets = np.array([0, limit - 1, 7, 2], np.int32)
    actual, expected = outputs(rows), outputs(rows)
    ops.token_logprobs(logits, targets, limit, num_top, *actual)
    OPS.token_logprobs(logits, targets, limit, num_top, *expected)
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-5)
    np.testing.assert_array_equal(actual[1], expected[1])
    np.testing.assert_array_equal(actual[2], expected[2])
    np.testing.assert_allclose(actual[3], expected[3], rtol=1e-5)
