"""bf16 rounding, norms and activations of the NumPy backend, against formulas in float64."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from deltaserve.engine.ops.numpy import NumpyOps
from deltaserve.engine.ops.numpy.activations import sigmoid, silu, softplus
from deltaserve.engine.ops.numpy.rounding import round_to_bf16

RNG = np.random.default_rng(0)
EPS = 1e-6


def test_rounding_is_that_of_bf16() -> None:
    """All exponents, ties, infinities and NaN, against ml_dtypes; also on a strided view."""
    bits = RNG.integers(0, 2**32, 100_000, dtype=np.uint32)
    ties = (np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)) | np.uint32(0x8000)
    values = np.concatenate([bits, ties]).view(np.float32)
    values = values[np.isfinite(values)]
    values = np.concatenate([values, np.array([np.inf, -np.inf, np.nan, 0.0, -0.0], np.float32)])
    expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    whole, wide = values.copy(), np.zeros((len(values), 3), np.float32)
    wide[:, 1] = values
    round_to_bf16(whole)
    round_to_bf16(wide[:, 1])
    np.testing.assert_array_equal(whole, expected)
    np.testing.assert_array_equal(wide[:, 1], expected)
    assert not wide[:, ::2].any()


@pytest.mark.filterwarnings("error")
def test_activations_over_their_whole_range() -> None:
    x = np.concatenate([np.linspace(-120, 120, 4001), [-3e38, 3e38, 0.0]]).astype(np.float32)
    wide = x.astype(np.float64)
    with np.errstate(over="ignore"):
        expected = 1 / (1 + np.exp(-wide))
    np.testing.assert_allclose(sigmoid(x), expected, rtol=1e-6, atol=1e-38)
    np.testing.assert_allclose(silu(x), wide * expected, rtol=1e-6, atol=1e-36)
    np.testing.assert_allclose(softplus(x), np.logaddexp(0, wide), rtol=1e-6, atol=1e-38)


def test_add_rms_norm_of_partials() -> None:
    partials = RNG.standard_normal((2, 3, 50), dtype=np.float32)
    residual = RNG.standard_normal((3, 50), dtype=np.float32)
    weight = RNG.standard_normal(50, dtype=np.float32)
    stream = residual.astype(np.float64) + partials.astype(np.float64).sum(axis=0)
    expected = stream / np.sqrt(np.mean(stream**2, -1, keepdims=True) + EPS) * (1 + weight)
    out = np.full_like(residual, np.nan)
    NumpyOps().add_rms_norm_partials(partials, residual, weight, EPS, out)
    np.testing.assert_allclose(residual, stream, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-6)


def test_rms_norm_rounds_once() -> None:
    """1 + weight and the quotient stay in fp32: to the bit the bf16 of the fp32 result."""
    x = RNG.standard_normal((7, 130), dtype=np.float32)
    weight = RNG.standard_normal(130, dtype=np.float32)
    fine, rounded = np.empty_like(x), np.empty_like(x)
    NumpyOps().rms_norm(x, weight, EPS, fine)
    NumpyOps(round_bf16=True).rms_norm(x, weight, EPS, rounded)
    np.testing.assert_array_equal(rounded, fine.astype(ml_dtypes.bfloat16).astype(np.float32))


def test_gated_rms_norm_takes_z_from_the_stacked_projection_in_place() -> None:
    tokens, heads, dim, channels = 5, 3, 10, 28
    stacked = RNG.standard_normal((tokens, channels + heads * dim + 2 * heads), dtype=np.float32)
    x = RNG.standard_normal((tokens, heads * dim), dtype=np.float32)
    weight = RNG.standard_normal(dim, dtype=np.float32)
    rows = x.reshape(tokens, heads, dim).astype(np.float64)
    z = stacked[:, channels : channels + heads * dim].reshape(rows.shape).astype(np.float64)
    expected = rows / np.sqrt(np.mean(rows**2, -1, keepdims=True) + EPS) * weight
    expected *= z / (1 + np.exp(-z))
    NumpyOps().gated_rms_norm(x, stacked, weight, EPS, x)
    np.testing.assert_allclose(x.reshape(rows.shape), expected, rtol=1e-5, atol=1e-6)
