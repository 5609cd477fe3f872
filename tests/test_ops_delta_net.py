"""The chunked delta rule and its parts, where the whole model would not show a weakness."""

from __future__ import annotations

import numpy as np
import pytest

from deltaserve.engine.ops.numpy.delta_net import _chunk, unit_lower_inverse

RNG = np.random.default_rng(1)


@pytest.mark.parametrize("count", [1, 2, 3, 17, 63, 64])
def test_unit_lower_inverse(count: int) -> None:
    a = RNG.standard_normal((3, count, count)).astype(np.float32) * np.float32(0.3)
    lower = np.tril(a, -1).astype(np.float64)
    inverse = unit_lower_inverse(a)  # what lies on and above the diagonal does not count
    product = inverse @ (np.eye(count) + lower)
    np.testing.assert_allclose(product, np.broadcast_to(np.eye(count), product.shape), atol=1e-3)
    assert not np.triu(inverse, 1).any()


def recurrent(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, beta: np.ndarray, g: np.ndarray, s: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Specification 4.1 in float64; one key head a value head."""
    s, outputs = s.astype(np.float64), []
    for t in range(len(q)):
        s = np.exp(g[t].astype(np.float64))[:, None, None] * s
        read = np.einsum("hkv,hk->hv", s, k[t])
        s = s + np.einsum("hk,hv->hkv", k[t], beta[t][:, None] * (v[t] - read))
        outputs.append(np.einsum("hkv,hk->hv", s, q[t]))
    return np.stack(outputs), s


@pytest.mark.parametrize(
    ("similarity", "decay", "write"),
    [
        pytest.param(0.0, 0.1, None, id="random keys"),
        pytest.param(0.95, 0.0, 1.0, id="keys alike, nothing forgotten, full writes"),
        pytest.param(0.0, 60.0, None, id="everything forgotten at once"),
    ],
)
@pytest.mark.parametrize("count", [5, 64])
def test_chunk_is_the_recurrence(
    count: int, similarity: float, decay: float, write: float | None
) -> None:
    heads, key_dim, value_dim = 3, 16, 24
    common = RNG.standard_normal((1, heads, key_dim))
    k = similarity * common + (1 - similarity) * RNG.standard_normal((count, heads, key_dim))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    q = RNG.standard_normal((count, heads, key_dim)) / key_dim
    v = RNG.standard_normal((count, heads, value_dim))
    beta = RNG.uniform(0, 1, (count, heads)) if write is None else np.full((count, heads), write)
    g = -decay * RNG.uniform(0, 1, (count, heads))
    state = RNG.standard_normal((heads, key_dim, value_dim)).astype(np.float32)
    expected, expected_state = recurrent(q, k, v, beta, g, state)
    stacked = np.stack([q, k], axis=1).astype(np.float32)
    single = [array.astype(np.float32) for array in (v, beta, g)]
    found = _chunk(stacked, *single, state)
    np.testing.assert_allclose(found, expected, atol=1e-4 * np.abs(expected).max())
    np.testing.assert_allclose(state, expected_state, atol=1e-4 * np.abs(expected_state).max())
