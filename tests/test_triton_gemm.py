"""The GEMM kernels in Triton's interpreter, against NumPy. fp32: no act rounding happens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .triton_interpreter import load_kernels

gemm = load_kernels("gemm")
import torch  # noqa: E402

pytestmark = pytest.mark.aot

RNG = np.random.default_rng(7)


def random(*shape: int) -> torch.Tensor:
    return torch.from_numpy(RNG.standard_normal(shape, dtype=np.float32))


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"))


def launch(
    kernel: str, m: int, n: int, k: int, segments: int, silu_mul: bool, blocks: tuple[int, int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, w, out) of one call on fresh random inputs."""
    block_n, block_m, block_k = blocks
    x, w = random(m, k), random(2 * n if silu_mul else n, k)
    out = poisoned(segments, m, n)
    columns = block_n // 2 if silu_mul else block_n
    segment = -(-k // segments // block_k) * block_k
    constants: dict[str, Any] = {
        "BLOCK_N": block_n,
        "BLOCK_M": block_m,
        "BLOCK_K": block_k,
        "SILU_MUL": silu_mul,
    }
    if kernel == "stream":
        grid = (-(-m // block_m), -(-n // columns), segments)
        gemm.gemm_stream_kernel[grid](
            x, w, out, m, n, k, segment, EARLY_START=False, PREFETCH_K=0, **constants
        )
    else:
        gemm.gemm_persistent_kernel[(3,)](
            x, w, out, m, n, k, segment, GROUP_M=2, EARLY_START=False, **constants
        )
    return x, w, out


def silu_mul_reference(x: np.ndarray, w: np.ndarray, n: int) -> np.ndarray:
    gate, up = x @ w[:n].T, x @ w[n:].T
    return gate / (1 + np.exp(-gate)) * up


@pytest.mark.parametrize("kernel", ["stream", "persistent"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 64), (3, 100, 128), (37, 72, 192)])
def test_linear(kernel: str, m: int, n: int, k: int) -> None:
    x, w, out = launch(kernel, m, n, k, 1, False, (32, 16, 32))
    np.testing.assert_allclose(out[0], x @ w.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", ["stream", "persistent"])
@pytest.mark.parametrize(("m", "n", "k"), [(2, 48, 64), (21, 40, 96)])
def test_linear_silu_mul(kernel: str, m: int, n: int, k: int) -> None:
    x, w, out = launch(kernel, m, n, k, 1, True, (32, 16, 32))
    expected = silu_mul_reference(x.numpy(), w.numpy(), n)
    np.testing.assert_allclose(out[0], expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kernel", ["stream", "persistent"])
def test_each_segment_sums_its_own_part_of_k(kernel: str) -> None:
    """160 in 3 segments of 64: the last one is shorter."""
    x, w, out = launch(kernel, 5, 36, 160, 3, False, (16, 16, 32))
    for segment, part in enumerate(out):
        span = slice(64 * segment, 64 * (segment + 1))
        np.testing.assert_allclose(part, x[:, span] @ w[:, span].T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernel", ["stream", "persistent"])
def test_nothing_is_written_beyond_the_output(kernel: str) -> None:
    m, n, k = 5, 24, 64
    guarded = poisoned(m * n + 64)
    args = (random(m, k), random(n, k), guarded[: m * n].view(m, n), m, n, k, k)
    constants = {"BLOCK_N": 16, "BLOCK_M": 16, "BLOCK_K": 32, "SILU_MUL": False}
    if kernel == "stream":
        gemm.gemm_stream_kernel[(1, 2, 1)](*args, EARLY_START=False, PREFETCH_K=0, **constants)
    else:
        gemm.gemm_persistent_kernel[(2,)](*args, GROUP_M=2, EARLY_START=False, **constants)
    assert torch.isfinite(guarded[: m * n]).all()
    assert torch.isnan(guarded[m * n :]).all()


def test_every_tile_is_visited_once_in_groups() -> None:
    """`tile_of` as plain arithmetic: 5 x 3 tiles in groups of 2 row tiles."""
    out = torch.zeros(5 * 3, dtype=torch.int32)
    visit_tiles[(1,)](out, 5, 3)
    assert out.tolist() == [1] * 15


import triton  # noqa: E402
import triton.language as tl  # noqa: E402

tile_of = gemm.tile_of


@triton.jit
def visit_tiles(out: Any, tiles_m: Any, tiles_n: Any) -> None:
    for index in range(tiles_m * tiles_n):
        m, n = tile_of(index, tiles_m, tiles_n, 2)
        at = out + m * tiles_n + n
        tl.store(at, tl.load(at) + 1)
