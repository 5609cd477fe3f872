"""Prefill attention in Triton's interpreter, against the NumPy op."""

from __future__ import annotations

import numpy as np
import pytest

from deltaserve.engine.forward_batch import PrefillBatch
from deltaserve.engine.ops.numpy.ops import NumpyOps

from .batches import prefill_batch
from .triton_interpreter import load_kernels

attention = load_kernels("attention_prefill")
import torch  # noqa: E402

pytestmark = pytest.mark.aot

D = 32
TILE_M, TILE_N = 16, 16
BLOCK_SIZE = 32
SLOTS, MAX_BLOCKS = 4, 5


def run(
    batch: PrefillBatch,
    q: np.ndarray,
    qgkv: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    tables: np.ndarray,
) -> np.ndarray:
    tokens, heads, _ = q.shape
    blocks, kv_heads, block_size, _ = k.shape
    out = torch.full((tokens, heads * D), float("nan"))
    arrays = (q, qgkv, k, v, tables, batch.cu_seqlens, batch.start_positions, batch.state_slots)
    attention.attention_prefill_kernel[(heads, tokens // TILE_M + batch.num_seqs)](
        *map(torch.from_numpy, arrays),
        out,
        batch.num_seqs,
        heads,
        kv_heads,
        blocks * kv_heads * block_size,
        block_size,
        MAX_BLOCKS,
        D=D,
        TILE_M=TILE_M,
        TILE_N=TILE_N,
    )
    return out.numpy()


@pytest.mark.parametrize(
    ("spans", "group"),
    [([(0, 1)], 4), ([(0, 50)], 6), ([(32, 71)], 4), ([(0, 5), (64, 65), (13, 47)], 4)],
    ids=["one token", "from zero", "cached prefix", "three sequences"],
)
def test_attention_prefill(spans: list[tuple[int, int]], group: int) -> None:
    """Entries and cache rows beyond the context hold poison, which nothing may read or keep."""
    rng = np.random.default_rng(3)
    kv_heads = 2
    heads = group * kv_heads
    batch = prefill_batch(spans, slots=[3, 0, 2][: len(spans)])
    tokens = batch.num_tokens
    tables = np.full((SLOTS, MAX_BLOCKS), -(10**6), np.int32)
    ids = rng.permutation(SLOTS * MAX_BLOCKS).astype(np.int32)
    k = np.full((SLOTS * MAX_BLOCKS, kv_heads, BLOCK_SIZE, D), np.nan, np.float32)
    v = k.copy()
    for index, (slot, (_, end)) in enumerate(zip(batch.host_state_slots, spans, strict=True)):
        for block in range(-(-end // BLOCK_SIZE)):
            physical = ids[index * MAX_BLOCKS + block]
            tables[slot, block] = physical
            rows = min(BLOCK_SIZE, end - block * BLOCK_SIZE)
            k[physical, :, :rows] = rng.standard_normal((kv_heads, rows, D))
            v[physical, :, :rows] = rng.standard_normal((kv_heads, rows, D))
    q = rng.standard_normal((tokens, heads, D), dtype=np.float32)
    qgkv = rng.standard_normal((tokens, (2 * heads + 2 * kv_heads) * D), dtype=np.float32)
    expected = np.empty((tokens, heads * D), np.float32)
    NumpyOps().attention_prefill(q, qgkv, k, v, tables, batch, expected)
    np.testing.assert_allclose(run(batch, q, qgkv, k, v, tables), expected, rtol=1e-4, atol=1e-5)


def test_a_row_does_not_see_how_the_prompt_was_cut() -> None:
    """Equal bits for the last rows of a prompt run whole and run after a cached prefix."""
    rng = np.random.default_rng(4)
    heads = kv_heads = 1
    tables = np.arange(MAX_BLOCKS, dtype=np.int32)[None]
    k, v = rng.standard_normal((2, MAX_BLOCKS, kv_heads, BLOCK_SIZE, D), dtype=np.float32)
    q = rng.standard_normal((70, heads, D), dtype=np.float32)
    qgkv = rng.standard_normal((70, 4 * D), dtype=np.float32)
    whole = run(prefill_batch([(0, 70)], [0]), q, qgkv, k, v, tables)
    tail = run(prefill_batch([(48, 70)], [0]), q[48:], qgkv[48:], k, v, tables)
    np.testing.assert_array_equal(tail, whole[48:])
