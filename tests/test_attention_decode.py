"""cuda/attention_decode.cu on the CPU (see cuda_on_cpu.h): one split so long that each warp takes
more groups of tokens than it knows blocks of at a time."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from .cuda_on_cpu import CpuKernels

BF16 = ml_dtypes.bfloat16
D = 256
HEADS = 2
BLOCK_SIZE = 64
CONTEXT = 131_072 + 4096
SPLIT = 4096
"""Tokens: a context of more than 64 splits of 2,048."""

pytestmark = pytest.mark.aot


@pytest.mark.parametrize("tokens", [SPLIT, SPLIT - 37])
def test_a_split_of_more_groups_than_a_warp_knows_blocks_of(tokens: int) -> None:
    """The last split of a row, whose other blocks are out of reach."""
    rng = np.random.default_rng(4)
    context = CONTEXT - SPLIT + tokens
    begin, blocks = CONTEXT - SPLIT, SPLIT // BLOCK_SIZE
    keys, values = (
        (rng.standard_normal((tokens, D), np.float32) * scale).astype(BF16) for scale in (1.0, 2.0)
    )
    caches = np.full((2, blocks * BLOCK_SIZE, D), np.nan, BF16)
    caches[0, :tokens], caches[1, :tokens] = keys, values
    places = rng.permutation(blocks).astype(np.int32)
    k, v = np.empty((2, blocks, 1, BLOCK_SIZE, D), BF16)
    for block, place in enumerate(places):
        rows = slice(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE)
        k[place, 0], v[place, 0] = caches[:, rows]
    tables = np.full((1, CONTEXT // BLOCK_SIZE), 10**8, np.int32)
    tables[0, begin // BLOCK_SIZE :] = places
    q = rng.standard_normal((1, HEADS, D), np.float32).astype(BF16)
    items = np.array([[0, begin, context, 0]], np.int32)
    out = np.full((1, HEADS, D), np.nan, np.float32)
    stats = np.full((1, HEADS, 2), np.nan, np.float32)

    first_items = np.array([0, 1], np.int32)
    arrays = (q, k, v, tables, items, first_items, out, stats)
    sizes = (1, HEADS, 1, BLOCK_SIZE, tables.shape[1])
    CpuKernels().launch("attention_decode", (2, 1, 1), 128, *arrays, *sizes)

    scores = q[0].astype(np.float64) @ keys.astype(np.float64).T / np.sqrt(D) * np.log2(np.e)
    weights = np.exp2(scores - scores.max(axis=1, keepdims=True))
    np.testing.assert_allclose(stats[0, :, 0], scores.max(axis=1), rtol=1e-5)
    np.testing.assert_allclose(stats[0, :, 1], weights.sum(axis=1), rtol=1e-4)
    expected = weights @ values.astype(np.float64)
    error = np.linalg.norm(out[0] - expected) / np.linalg.norm(expected)
    assert error < 5e-3  # weights are rounded to bf16
