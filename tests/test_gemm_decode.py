"""cuda/gemm_decode.cu on the CPU (see cuda_on_cpu.h), through `Gemm`, against float64."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from deltaserve.engine.ops.cuda.gemm import Gemm, compiled_tiles, named_tile

from .cuda_on_cpu import CUDA, CpuKernels, dynamic_shared, kernels

pytestmark = pytest.mark.aot

BF16 = ml_dtypes.bfloat16


@pytest.fixture(scope="module")
def gemm() -> Gemm:
    return Gemm(CpuKernels())


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(5)


def run(
    gemm: Gemm,
    rng: np.random.Generator,
    form: str,
    m: int,
    n: int,
    k: int,
    parts: int,
    tile: str = "decode_64x8",
) -> tuple[np.ndarray, np.ndarray]:
    """(result, float64 reference), [parts, m, n]; the memory behind the result stays poisoned."""
    rows = 2 * n if form == "silu_mul" else n
    w = (rng.standard_normal((rows, k), dtype=np.float32) * k**-0.5).astype(BF16)
    x = rng.standard_normal((m, k), dtype=np.float32).astype(BF16)
    segment = -(-k // parts // 128) * 128
    dtype: Any = np.float32 if form == "fp32" else BF16
    memory = np.full(parts * m * n + 64, np.nan, dtype)
    out = memory[: parts * m * n].reshape(parts, m, n)
    gemm.launch_tile(named_tile(form, tile), x, w, out, n, segment, parts)
    assert np.isnan(memory[parts * m * n :].astype(np.float32)).all()
    x64, w64 = x.astype(np.float64), w.astype(np.float64)
    spans = [slice(i * segment, (i + 1) * segment) for i in range(parts)]
    products = np.stack([x64[:, span] @ w64[:, span].T for span in spans])
    if form == "silu_mul":
        gate, up = products[..., :n], products[..., n:]
        products = gate / (1 + np.exp(-gate)) * up
    return out.astype(np.float64), products


NAMES = [name.removesuffix("_kernel") for name in kernels((CUDA / "gemm_decode.cu").read_text())]
TILES = [(f, tile) for f in ("bf16", "fp32", "silu_mul") for tile in compiled_tiles(f, NAMES)]


@pytest.mark.parametrize(("form", "tile"), TILES)
@pytest.mark.parametrize("k", [256, 1152])
def test_each_kernel(gemm: Gemm, rng: np.random.Generator, form: str, tile: str, k: int) -> None:
    """Rows and columns past the last whole tile; 256 of K are fewer steps than a ring of 64 has."""
    actual, expected = run(gemm, rng, form, 21, 104, k, 1, tile)
    tolerance = {"fp32": 1e-5, "bf16": 4e-3, "silu_mul": 8e-3}[form]
    assert np.linalg.norm(actual - expected) <= tolerance * np.linalg.norm(expected)
    assert np.isfinite(actual).all()


def test_stages_come_round(gemm: Gemm, rng: np.random.Generator) -> None:
    """20 steps through the ring, and two tiles of rows."""
    actual, expected = run(gemm, rng, "fp32", 11, 64, 2560, 1)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_each_segment_sums_its_own_part_of_k(gemm: Gemm, rng: np.random.Generator) -> None:
    """1152 in 4 segments of 384: the last one is empty, and zero."""
    actual, expected = run(gemm, rng, "fp32", 3, 40, 1152, 4)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    assert (actual[3] == 0).all() and (actual[:3] != 0).all()


def test_a_row_does_not_depend_on_the_others(gemm: Gemm) -> None:
    def rows(m: int) -> np.ndarray:
        """The first rows of x are the same for any m, and so are the weights."""
        return run(gemm, np.random.default_rng(2), "fp32", m, 24, 384, 1)[0]

    np.testing.assert_array_equal(rows(16)[:, :5], rows(5))


@pytest.mark.parametrize(("form", "tile"), TILES)
def test_the_tile_changes_no_bit(gemm: Gemm, form: str, tile: str) -> None:
    runs = (
        run(gemm, np.random.default_rng(3), form, 19, 104, 640, 1, t) for t in ("decode_64x8", tile)
    )
    np.testing.assert_array_equal(*(actual for actual, _ in runs))


def test_every_kernel_says_how_much_shared_memory_it_takes() -> None:
    text = (CUDA / "gemm_decode.cu").read_text()
    for large, limit in ((False, 101_376), (True, 115_712)):
        expected = {}
        for form, name in TILES:
            tile = named_tile(form, name)
            width = tile.threads // 2
            stage = (width + tile.rows) * (64 if width > 96 else 128) * 2
            expected[tile.kernel] = limit // stage * stage
        assert dynamic_shared(text, large) == expected
