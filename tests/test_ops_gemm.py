"""The NumPy backend's matrix products: right, and a row's bits a function of that row alone."""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from deltaserve.engine.ops.numpy import NumpyOps
from deltaserve.engine.ops.numpy.gemm import TILE, linear_rows, linear_tiles

SIZES = [(2, 3), (7, 130), (8, 16), (33, 31), (70, 64), (70, 130), (128, 96), (129, 512)]
SIZES += [(250, 1027), (608, 128), (1544, 128), (512, 2048)]
FORMS = pytest.mark.parametrize("linear", [linear_tiles, linear_rows])


def operands(rows: int, n: int, kd: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n * kd)
    return (
        rng.standard_normal((rows, kd), dtype=np.float32),
        rng.standard_normal((n, kd), dtype=np.float32),
    )


@FORMS
@pytest.mark.parametrize(("n", "kd"), SIZES)
def test_rows_keep_their_bits_at_any_place_in_any_batch(linear, n: int, kd: int) -> None:
    x, weight = operands(2 * TILE + 5, n, kd)
    alone = np.empty((len(x), n), np.float32)
    for i in range(len(x)):
        linear(x[i : i + 1], weight, alone[i : i + 1])
    expected = x.astype(np.float64) @ weight.T.astype(np.float64)
    np.testing.assert_allclose(alone, expected, rtol=0, atol=2e-6 * np.sqrt(kd) * 4)
    for first in range(TILE):
        together = np.full((len(x) - first, n), np.nan, np.float32)
        linear(x[first:], weight, together)
        np.testing.assert_array_equal(together, alone[first:])


@FORMS
def test_rows_do_not_see_a_failed_row(linear) -> None:
    x, weight = operands(TILE, 70, 130)
    clean, found = np.empty((TILE, 70), np.float32), np.empty((TILE, 70), np.float32)
    linear(x, weight, clean)
    x[5] = np.nan
    linear(x, weight, found)
    others = np.arange(TILE) != 5
    np.testing.assert_array_equal(found[others], clean[others])


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_with_any_number_of_blas_threads(threads: int) -> None:
    """The number is read when NumPy is loaded, hence the fresh interpreter."""
    code = (
        "import numpy as np; from deltaserve.engine.ops.numpy.gemm import *\n"
        "rng = np.random.default_rng(0)\n"
        "for linear in (linear_tiles, linear_rows):\n"
        "    for n, kd in ((70, 130), (512, 128), (1544, 640), (512, 2048)):\n"
        "        x = np.repeat(rng.standard_normal((1, kd), dtype=np.float32), 37, 0)\n"
        "        weight = rng.standard_normal((n, kd), dtype=np.float32)\n"
        "        out = np.empty((37, n), np.float32)\n"
        "        linear(x, weight, out)\n"
        "        assert (out == out[0]).all(), (linear, n, kd)\n"
    )
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": str(threads)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("rows", [1, 5, 64, 131])
@pytest.mark.parametrize("phase", ["linear_silu_mul", "linear_silu_mul_decode"])
def test_linear_silu_mul(phase: str, rows: int) -> None:
    x, weight = operands(rows, 2 * 33, 50)
    out = np.full((rows, 33), np.nan, np.float32)
    getattr(NumpyOps(), phase)(x, weight, out)
    gate, up = np.split(x.astype(np.float64) @ weight.T, 2, axis=1)
    np.testing.assert_allclose(out, gate / (1 + np.exp(-gate)) * up, rtol=1e-4, atol=1e-4)


def test_partials_add_up_to_linear() -> None:
    """One segment: the sum of decode's partials is its linear, to the bit."""
    ops = NumpyOps()
    x, weight = operands(3, 70, 130)
    segments = ops.num_segments(*weight.shape)
    partials, whole = np.empty((segments, 3, 70), np.float32), np.empty((3, 70), np.float32)
    ops.linear_partials(x, weight, partials)
    ops.linear_decode(x, weight, whole)
    np.testing.assert_array_equal(partials.sum(axis=0), whole)
