"""CudaOps with the kernels of cuda/ run on the CPU (see cuda_on_cpu.h), against NumpyOps.

Both round to bf16 at the same points, and both sum in fp32 but in another order: most values are
equal, and where the sum falls on a rounding border the two are neighbouring bf16 numbers, 2^-8 to
2^-7 apart.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from deltaserve.engine.forward_batch import SampleBatch, SampleParams
from deltaserve.engine.ops.cuda.ops import CudaOps, OpsShape
from deltaserve.engine.ops.numpy.ops import NumpyOps

from .batches import decode_batch, prefill_batch
from .cuda_on_cpu import CpuKernels

BF16 = ml_dtypes.bfloat16
EPS = 1e-6
HEAD = 128
D = 256
ULP = 2.0**-7

pytestmark = pytest.mark.aot


@pytest.fixture(scope="module")
def kernels() -> CpuKernels:
    return CpuKernels()


@pytest.fixture(scope="module")
def kernels_before_sm_90() -> CpuKernels:
    return CpuKernels("NO_BULK_COPIES")


SHAPE = OpsShape(12, 6, max_decode_rows=8, max_prefill_tokens=64)


@pytest.fixture
def ops(kernels: CpuKernels) -> CudaOps:
    return CudaOps(kernels, SHAPE, np.empty)


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(11)


def act(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Random bf16 values."""
    return rng.standard_normal(shape, dtype=np.float32).astype(BF16)


def poisoned(*shape: int, dtype: Any = BF16) -> np.ndarray:
    return np.full(shape, np.nan, dtype)


def f32(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32)


def assert_close(actual: np.ndarray, expected: np.ndarray) -> None:
    """Neighbouring bf16 numbers, and equal in almost all places."""
    np.testing.assert_allclose(f32(actual), expected, rtol=ULP, atol=1e-3)
    assert np.mean(f32(actual) == expected) > 0.98


REFERENCE = NumpyOps(round_bf16=True)


def test_take_rows(ops: CudaOps, rng: np.random.Generator) -> None:
    table, rows = act(rng, 9, 40), np.array([8, 0, 3, 3, -1], np.int32)
    out = poisoned(5, 40)
    ops.take_rows(table, rows, out)
    np.testing.assert_array_equal(out[:4], table[rows[:4]])
    np.testing.assert_array_equal(f32(out[4]), 0)


@pytest.mark.parametrize("size", [256, 648])
def test_rms_norm(ops: CudaOps, rng: np.random.Generator, size: int) -> None:
    x, weight, out = act(rng, 3, size), act(rng, size), poisoned(3, size)
    ops.rms_norm(x, weight, EPS, out)
    expected = np.empty((3, size), np.float32)
    REFERENCE.rms_norm(f32(x), f32(weight), EPS, expected)
    assert_close(out, expected)


@pytest.mark.parametrize("segments", [0, 1, 3])
def test_add_rms_norm(ops: CudaOps, rng: np.random.Generator, segments: int) -> None:
    """0 segments: one bf16 branch."""
    size = 264
    residual, weight, out = act(rng, 3, size), act(rng, size), poisoned(3, size)
    expected_residual, expected = f32(residual), np.empty((3, size), np.float32)
    if segments:
        branch = rng.standard_normal((segments, 3, size), dtype=np.float32)
        ops.add_rms_norm_partials(branch, residual, weight, EPS, out)
        REFERENCE.add_rms_norm_partials(branch, expected_residual, f32(weight), EPS, expected)
    else:
        branch = act(rng, 3, size)
        ops.add_rms_norm(branch, residual, weight, EPS, out)
        REFERENCE.add_rms_norm(f32(branch), expected_residual, f32(weight), EPS, expected)
    np.testing.assert_array_equal(f32(residual), expected_residual)
    assert_close(out, expected)


@pytest.mark.parametrize(("query_heads", "kv_heads"), [(4, 1), (12, 2)])
def test_qk_norm_rope_write(
    ops: CudaOps, rng: np.random.Generator, query_heads: int, kv_heads: int
) -> None:
    positions = np.array([0, 5, 262_143, 77], np.int32)
    slots = np.array([3, 64, 31, 96], np.int32)
    qgkv = act(rng, 4, (2 * query_heads + 2 * kv_heads) * D)
    q_norm, k_norm = act(rng, D), act(rng, D)
    inv_freq = (1e7 ** (-np.arange(32) / 32)).astype(np.float32)
    outs = [poisoned(4, query_heads, D), *(np.zeros((4, kv_heads, 32, D), BF16) for _ in "kv")]
    expected = [f32(out) for out in outs]
    ops.qk_norm_rope_write(qgkv, q_norm, k_norm, EPS, inv_freq, positions, slots, *outs)
    REFERENCE.qk_norm_rope_write(
        f32(qgkv), f32(q_norm), f32(k_norm), EPS, inv_freq, positions, slots, *expected
    )
    for actual, wanted in zip(outs, expected, strict=True):
        assert_close(actual, wanted)


def test_a_padding_row_writes_nothing_to_the_cache(ops: CudaOps, rng: np.random.Generator) -> None:
    minus = np.array([-1], np.int32)
    q, k, v = poisoned(1, 4, D), poisoned(1, 1, 16, D), poisoned(1, 1, 16, D)
    inv_freq = np.ones(32, np.float32)
    qgkv, norm = act(rng, 1, 10 * D), act(rng, D)
    ops.qk_norm_rope_write(qgkv, norm, norm, EPS, inv_freq, minus + 1, minus, q, k, v)
    assert np.isnan(f32(k)).all() and np.isnan(f32(v)).all()


@pytest.mark.parametrize("fixture", ["kernels", "kernels_before_sm_90"])
@pytest.mark.parametrize(("query_heads", "kv_heads"), [(4, 1), (12, 2)])
def test_attention_decode(
    request: pytest.FixtureRequest,
    rng: np.random.Generator,
    query_heads: int,
    kv_heads: int,
    fixture: str,
) -> None:
    """Contexts around the borders of groups (16), tiles (64) and splits; the last row is padding.
    What lies beyond a context is poison."""
    ops = CudaOps(request.getfixturevalue(fixture), SHAPE, np.empty)
    block_size, max_blocks = 32, 140
    positions, slots = [0, 15, 64, 200, 4200, 0], [4, 1, 0, 2, 3, -1]
    batch = decode_batch(positions, slots)
    tables = np.full((5, max_blocks), 10**8, np.int32)
    k = poisoned(sum(p // block_size + 1 for p in positions), kv_heads, block_size, D)
    v = k.copy()
    free = iter(rng.permutation(len(k)).tolist())
    for position, slot in zip(positions[:-1], slots[:-1], strict=True):
        for block in range(position // block_size + 1):
            tables[slot, block] = physical = next(free)
            rows = min(block_size, position + 1 - block * block_size)
            k[physical, :, :rows], v[physical, :, :rows] = act(rng, 2, kv_heads, rows, D)
    q = act(rng, 6, query_heads, D)
    qgkv = act(rng, 6, (2 * query_heads + 2 * kv_heads) * D)
    out = poisoned(6, query_heads * D)
    batch.input_ids[:] = [7, -1, 7, -1, 7, 7]
    ops.prepare_decode(batch, np.arange(100, 105, dtype=np.int32), tables, block_size)
    assert batch.input_ids.tolist() == [7, 101, 7, 102, 7, -1]
    at = [tables[s, p // 32] * 32 + p % 32 for p, s in zip(positions, slots, strict=True)]
    assert batch.slot_mapping.tolist() == [*at[:-1], -1]
    ops.attention_decode(q, qgkv, k, v, tables, batch, out)

    real = decode_batch(positions[:-1], slots[:-1])
    expected = np.empty((5, query_heads * D), np.float32)
    REFERENCE.attention_decode(f32(q[:5]), f32(qgkv[:5]), f32(k), f32(v), tables, real, expected)
    # weights are rounded to bf16 before they meet v: more than the reference does
    np.testing.assert_allclose(f32(out[:5]), expected, rtol=0.02, atol=0.01)
    np.testing.assert_array_equal(f32(out[5]), 0)


SPANS = [(0, 2), (0, 37), (62, 64), (5, 40), (64, 65), (127, 129), (62, 130)]
SLOTS = [4, 0, 3, 1, 2, 5, 8]
INITIAL_SLOTS = [-1, -1, 3, 6, 7, -1, 8]
SNAPSHOTS = [[], [], [(64, 9)], [], [], [(128, 10)], [(64, 11), (128, 12)]]


@pytest.mark.parametrize("snapshots", [False, True])
def test_causal_conv1d(ops: CudaOps, rng: np.random.Generator, snapshots: bool) -> None:
    """With snapshots, rows of the rings that a call leaves come from its tokens, from another
    slot, from zeros and from its own slot."""
    key_heads, value_heads = 1, 2
    channels = (2 * key_heads + value_heads) * HEAD
    batch = prefill_batch(SPANS, SLOTS, *((INITIAL_SLOTS, SNAPSHOTS) if snapshots else ()))
    qkvzba = act(rng, batch.num_tokens, channels + value_heads * (HEAD + 4))
    weight, state = act(rng, channels, 4), act(rng, 13, 4, channels)
    out = poisoned(batch.num_tokens, channels)
    expected_state, expected = f32(state), np.empty(out.shape, np.float32)
    ops.causal_conv1d(qkvzba, weight, batch, state, out)
    REFERENCE.causal_conv1d(f32(qkvzba), f32(weight), batch, expected_state, expected)
    assert_close(out, expected)
    np.testing.assert_array_equal(f32(state), expected_state)


def test_gated_rms_norm(ops: CudaOps, rng: np.random.Generator) -> None:
    key_heads, value_heads = 2, 6
    x = act(rng, 3, value_heads * HEAD)
    qkvzba = act(rng, 3, (2 * key_heads + 2 * value_heads) * HEAD + 2 * value_heads)
    weight = rng.standard_normal(HEAD, dtype=np.float32)
    expected = np.empty(x.shape, np.float32)
    REFERENCE.gated_rms_norm(f32(x), f32(qkvzba), weight, EPS, expected)
    ops.gated_rms_norm(x, qkvzba, weight, EPS, x)
    assert_close(x, expected)


@pytest.mark.parametrize("rep", [1, 2, 3])
def test_delta_net_decode(ops: CudaOps, rng: np.random.Generator, rep: int) -> None:
    """The last row is padding: its slot below 0 must not be touched."""
    key_heads = 2
    value_heads = key_heads * rep
    channels = (2 * key_heads + value_heads) * HEAD
    positions, slots = [0, 1, 2, 3, 130, 9], [5, 0, 2, 1, 3, -1]
    qkvzba = act(rng, 6, channels + value_heads * (HEAD + 2))
    conv_weight = act(rng, channels, 4)
    a_log, dt_bias = rng.standard_normal((2, value_heads), dtype=np.float32)
    norm = rng.standard_normal(HEAD, dtype=np.float32)
    conv_state = act(rng, 6, 4, channels)
    state = rng.standard_normal((6, value_heads, HEAD, HEAD), dtype=np.float32)
    state[5] = 0  # of the row at position 0: read as zeros
    expected_conv, expected_state = f32(conv_state), state.copy()
    state[5] = np.nan
    out = poisoned(6, value_heads * HEAD)
    weights = (a_log, dt_bias, norm, EPS)
    ops.delta_net_decode(
        qkvzba, conv_weight, *weights, decode_batch(positions, slots), conv_state, state, out
    )
    expected = np.empty((5, value_heads * HEAD), np.float32)
    REFERENCE.delta_net_decode(
        f32(qkvzba[:5]),
        f32(conv_weight),
        *weights,
        decode_batch(positions[:5], slots[:5]),
        expected_conv,
        expected_state,
        expected,
    )
    np.testing.assert_array_equal(f32(conv_state), expected_conv)
    np.testing.assert_allclose(state, expected_state, rtol=1e-4, atol=1e-5)
    assert_close(out[:5], expected)
    assert np.isnan(f32(out[5])).all()


def test_delta_net_decode_rows_alone_have_the_bits_they_have_among_others(
    ops: CudaOps, rng: np.random.Generator
) -> None:
    """Alone a row is its block's only one; among others a block goes on to the next ones, of which
    some are padding and one starts from zeros."""
    heads, slots = 2, [4, -1, 0, 2, 1, -1, 3]
    channels = 3 * heads * HEAD
    positions = [7, 0, 0, 66, 3, 0, 1]
    rows = len(slots)
    qkvzba = act(rng, rows, channels + heads * (HEAD + 2))
    weights = (
        act(rng, channels, 4),
        *rng.standard_normal((2, heads), dtype=np.float32),
        rng.standard_normal(HEAD, dtype=np.float32),
        EPS,
    )
    conv_state = act(rng, 5, 4, channels)
    state = rng.standard_normal((5, heads, HEAD, HEAD), dtype=np.float32)

    def run(picked: list[int]) -> tuple[np.ndarray, np.ndarray]:
        batch = decode_batch([positions[i] for i in picked], [slots[i] for i in picked])
        after, out = state.copy(), poisoned(len(picked), heads * HEAD)
        ops.delta_net_decode(qkvzba[picked], *weights, batch, conv_state.copy(), after, out)
        return f32(out), after

    out, after = run(list(range(rows)))
    for row, slot in enumerate(slots):
        if slot >= 0:
            alone, alone_after = run([row])
            np.testing.assert_array_equal(out[row], alone[0])
            np.testing.assert_array_equal(after[slot], alone_after[slot])


@pytest.mark.parametrize("dtype", [np.int32, np.float32, np.uint64])
def test_scatter(ops: CudaOps, dtype: Any) -> None:
    out = np.zeros((3, 50), dtype)
    indices = np.array([0, 149, 51], np.int32)
    ops.scatter(np.array([5, 6, 7], dtype), indices, out)
    expected = np.zeros(150, dtype)
    expected[indices] = [5, 6, 7]
    np.testing.assert_array_equal(out.reshape(-1), expected)


def sample_params(rng: np.random.Generator) -> SampleParams:
    """Slots 0-5: greedy, plain, top-k, top-p, min-p, all three; slot 6 is the row that fails."""
    return SampleParams(
        temperature=np.array([0, 1, 0.8, 1.3, 1, 0.9, 0], np.float32),
        top_p=np.array([1, 1, 1, 0.7, 1, 0.9, 1], np.float32),
        min_p=np.array([0, 0, 0, 0, 0.05, 0.01, 0], np.float32),
        top_k=np.array([0, 0, 5, 0, 0, 40, 0], np.int32),
        seed=rng.integers(0, 2**64, 7, np.uint64),
        num_logprobs=np.array([3, -1, 20, 0, -1, 5, 3], np.int32),
    )


@pytest.mark.parametrize("vocab_limit", [4999, 13])
def test_sample(ops: CudaOps, rng: np.random.Generator, vocab_limit: int) -> None:
    """Ids are those of the reference; ids from vocab_limit on are the largest and never sampled."""
    vocab, rows = 5001, 7
    logits = (3 * rng.standard_normal((rows, vocab))).astype(np.float32)
    logits[:, ::3] = np.round(logits[:, ::3])  # ties
    logits[:, vocab_limit:] = 100.0
    logits[6, 7] = np.inf
    batch = SampleBatch(
        rows=np.array([2, 0, 1, 3, 5, 4, 6], np.int32),
        state_slots=np.array([3, 1, 0, 2, 4, 5, 6], np.int32),
        positions=np.array([10, 999, 3, 4, 70_000, 6, 1], np.int32),
        params=sample_params(rng),
        vocab_limit=vocab_limit,
    )
    shapes = [(7,), (rows,), (rows,), (rows, 20), (rows, 20)]
    dtypes = [np.int32, np.int32, np.float32, np.int32, np.float32]
    actual = [np.full(shape, -7, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    expected = [array.copy() for array in actual]
    ops.sample(logits, batch, *actual)
    REFERENCE.sample(logits, batch, *expected)
    next_ids, ids, logprobs, top_ids, top_logprobs = actual
    np.testing.assert_array_equal(ids, expected[1])
    np.testing.assert_array_equal(next_ids, expected[0])
    np.testing.assert_allclose(logprobs, expected[2], rtol=1e-5)
    np.testing.assert_array_equal(top_ids, expected[3])
    np.testing.assert_allclose(top_logprobs, expected[4], rtol=1e-5)
