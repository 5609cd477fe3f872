"""Paged attention of the NumPy backend over long contexts and block sizes, and plain softmax."""

from __future__ import annotations

import numpy as np
import pytest

from deltaserve.engine.forward_batch import DecodeBatch
from deltaserve.engine.ops.numpy import NumpyOps

from .batches import prefill_batch

HEADS, KV_HEADS, DIM = 4, 2, 16
RNG = np.random.default_rng(2)


def paged(array: np.ndarray, block_size: int, table: np.ndarray) -> np.ndarray:
    """[T, NKV, D] in blocks [blocks, NKV, block_size, D]; NaN where nothing is stored."""
    cache = np.full((table.max() + 1, KV_HEADS, block_size, DIM), np.nan, np.float32)
    for position, row in enumerate(array):
        cache[table[position // block_size], :, position % block_size] = row
    return cache


def plain(q: np.ndarray, k: np.ndarray, v: np.ndarray, gate: np.ndarray, first: int) -> np.ndarray:
    """float64; the rows of q are at positions first, first + 1, ..."""
    out = []
    for i, row in enumerate(q.astype(np.float64)):
        keys, values = (np.repeat(x[: first + i + 1], HEADS // KV_HEADS, axis=1) for x in (k, v))
        scores = np.einsum("hd,thd->ht", row, keys) / np.sqrt(DIM)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out.append(np.einsum("ht,thd->hd", weights, values).ravel())
    return np.array(out) / (1 + np.exp(-gate.astype(np.float64)))


@pytest.mark.parametrize("block_size", [16, 64, 96, 1024])
@pytest.mark.parametrize(("start", "count"), [(0, 130), (512, 70), (1100, 1), (509, 8)])
def test_one_sequence(block_size: int, start: int, count: int) -> None:
    """Both phases, also across the 512 positions that a query tile reads at a time."""
    length = start + count
    blocks = -(-length // block_size)
    table = np.zeros((2, blocks + 2), np.int32)
    table[1] = np.iinfo(np.int32).max  # entries beyond the context are never used
    table[1, :blocks] = RNG.permutation(blocks + 3)[:blocks]
    k, v = (RNG.standard_normal((length, KV_HEADS, DIM), dtype=np.float32) for _ in range(2))
    k_cache, v_cache = (paged(x, block_size, table[1, :blocks]) for x in (k * 2, v))
    q = RNG.standard_normal((count, HEADS, DIM), dtype=np.float32) * 2
    qgkv = RNG.standard_normal((count, (2 * HEADS + 2 * KV_HEADS) * DIM), dtype=np.float32)
    gate = qgkv[:, HEADS * DIM : 2 * HEADS * DIM]
    expected = plain(q, k * 2, v, gate, start)
    positions, slots = np.arange(start, length, dtype=np.int32), np.ones(1, np.int32)

    out = np.full((count, HEADS * DIM), np.nan, np.float32)
    batch = prefill_batch([(start, length)], [1])
    NumpyOps().attention_prefill(q, qgkv, k_cache, v_cache, table, batch, out)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-5)

    last = np.full((1, HEADS * DIM), np.nan, np.float32)
    step = DecodeBatch(positions[-1:], positions[-1:], slots, slots)
    NumpyOps().attention_decode(q[-1:], qgkv[-1:], k_cache, v_cache, table, step, last)
    np.testing.assert_allclose(last, expected[-1:], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [65, 200, 1100])
def test_no_block_size_changes_a_bit(length: int) -> None:
    """Sums are cut at absolute multiples of 64, whatever blocks the context lies in."""
    k, v, q = (
        RNG.standard_normal((length, heads, DIM), dtype=np.float32)
        for heads in (KV_HEADS, KV_HEADS, HEADS)
    )
    qgkv = RNG.standard_normal((length, (2 * HEADS + 2 * KV_HEADS) * DIM), dtype=np.float32)
    last, slots = np.full(1, length - 1, np.int32), np.zeros(1, np.int32)
    results = []
    for block_size in range(64, 1025, 64):  # all that EngineConfig allows
        blocks = -(-length // block_size)
        table = RNG.permutation(blocks)[None].astype(np.int32)
        caches = paged(k, block_size, table[0]), paged(v, block_size, table[0])
        out = np.full((length + 1, HEADS * DIM), np.nan, np.float32)
        batch = prefill_batch([(0, length)], [0])
        NumpyOps().attention_prefill(q, qgkv, *caches, table, batch, out[:length])
        step = DecodeBatch(last, last, slots, slots)
        NumpyOps().attention_decode(q[-1:], qgkv[-1:], *caches, table, step, out[length:])
        results.append(out)
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def test_ids_that_only_the_device_knows_and_their_kv_slots() -> None:
    batch = DecodeBatch(
        input_ids=np.array([7, -1, -1], np.int32),
        positions=np.array([63, 64, 130], np.int32),
        state_slots=np.array([2, 0, 1], np.int32),
        slot_mapping=np.zeros(3, np.int32),
    )
    tables = np.array([[9, 4, 0], [1, 2, 3], [5, 6, 7]], np.int32)
    NumpyOps().prepare_decode(batch, np.array([11, 12, 13], np.int32), tables, 64)
    assert batch.input_ids.tolist() == [7, 11, 12]
    assert batch.slot_mapping.tolist() == [5 * 64 + 63, 4 * 64, 3 * 64 + 2]
