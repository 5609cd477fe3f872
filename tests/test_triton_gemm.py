"""The GEMM kernels in Triton's interpreter, against NumPy. fp32: no act rounding happens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from .triton_interpreter import load_kernels

gemm = load_kernels("gemm")
import torch  # noqa: E402
from gemm_tiles import Tile  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

pytestmark = pytest.mark.aot

RNG = np.random.default_rng(7)


def random(*shape: int) -> torch.Tensor:
    return torch.from_numpy(RNG.standard_normal(shape, dtype=np.float32))


def poisoned(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"))


def run_persistent(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    segment: int,
    silu_mul: bool,
    blocks: tuple[int, int, int],
    by_map: bool = False,
) -> None:
    """x [M, K], w [N, K] or [2 N, K], out [S, M, N]. blocks[0] rows as one or two products; by_map:
    out is stored by a tensor map."""
    (_, m, n), k, (_, block_m, block_k) = out.shape, x.shape[1], blocks
    main, extra = Tile("persistent", *blocks, 1, 1).parts
    gates = 2 if silu_mul else 1
    weight = w.view(2, n, k) if silu_mul else w

    def w_map(rows: int) -> TensorDescriptor:
        block = [2, rows // 2, block_k] if silu_mul else [rows, block_k]
        return TensorDescriptor.from_tensor(weight, block)

    gemm.gemm_persistent_kernel[(3,)](
        TensorDescriptor.from_tensor(x, [block_m, block_k]),
        w_map(main),
        w_map(extra) if extra else None,
        TensorDescriptor.from_tensor(out[0], [block_m, main // gates]) if by_map else None,
        out,
        m,
        n,
        k,
        segment,
        BLOCK_N=main,
        EXTRA_N=extra,
        BLOCK_M=block_m,
        BLOCK_K=block_k,
        SILU_MUL=silu_mul,
        GROUP_M=2,
        EARLY_START=False,
    )


def run_stream(
    x: torch.Tensor,
    w: torch.Tensor,
    out: torch.Tensor,
    segment: int,
    silu_mul: bool,
    blocks: tuple[int, int, int],
) -> None:
    (segments, m, n), (block_n, block_m, block_k) = out.shape, blocks
    columns = block_n // 2 if silu_mul else block_n
    constants: dict[str, Any] = {"BLOCK_N": block_n, "BLOCK_M": block_m, "BLOCK_K": block_k}
    gemm.gemm_stream_kernel[(-(-m // block_m), -(-n // columns), segments)](
        x, w, out, m, n, x.shape[1], segment, SILU_MUL=silu_mul, EARLY_START=False, **constants
    )


def launch(
    kernel: str, m: int, n: int, k: int, segments: int, silu_mul: bool, blocks: tuple[int, int, int]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(x, w, out) of one call on fresh random inputs."""
    x, w = random(m, k), random(2 * n if silu_mul else n, k)
    out = poisoned(segments, m, n)
    segment = -(-k // segments // blocks[2]) * blocks[2]
    if kernel == "stream":
        run_stream(x, w, out, segment, silu_mul, blocks)
    else:
        run_persistent(x, w, out, segment, silu_mul, blocks, by_map=kernel == "by map")
    return x, w, out


def silu_mul_reference(x: np.ndarray, w: np.ndarray, n: int) -> np.ndarray:
    gate, up = x @ w[:n].T, x @ w[n:].T
    return gate / (1 + np.exp(-gate)) * up


KERNELS = [("stream", 32), ("persistent", 32), ("persistent", 48), ("by map", 32)]


@pytest.mark.parametrize(("kernel", "width"), KERNELS)
@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 64), (3, 100, 128), (37, 72, 192)])
def test_linear(kernel: str, width: int, m: int, n: int, k: int) -> None:
    x, w, out = launch(kernel, m, n, k, 1, False, (width, 16, 32))
    np.testing.assert_allclose(out[0], x @ w.T, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kernel", "width"), KERNELS)
@pytest.mark.parametrize(("m", "n", "k"), [(2, 48, 64), (21, 40, 96)])
def test_linear_silu_mul(kernel: str, width: int, m: int, n: int, k: int) -> None:
    x, w, out = launch(kernel, m, n, k, 1, True, (width, 16, 32))
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
    out = guarded[: m * n].view(1, m, n)
    if kernel == "stream":
        run_stream(random(m, k), random(n, k), out, k, False, (16, 16, 32))
    else:
        run_persistent(random(m, k), random(n, k), out, k, False, (48, 16, 32))
    assert torch.isfinite(guarded[: m * n]).all()
    assert torch.isnan(guarded[m * n :]).all()


@pytest.mark.parametrize("silu_mul", [False, True])
def test_groups_of_rows_with_their_own_weights(silu_mul: bool) -> None:
    """Groups of 0, 20, 1, 0, 16 and 3 rows; tiles of 16."""
    starts = torch.tensor([0, 0, 20, 21, 21, 37, 40], dtype=torch.int32)
    groups, m, n, k = 6, 40, 24, 64
    x, w, out = random(m, k), random(groups, 2 * n if silu_mul else n, k), poisoned(m + 1, n)
    columns = 16 if silu_mul else 32
    gemm.gemm_grouped_kernel[(m // 16 + groups, -(-n // columns))](
        x,
        w,
        out,
        starts,
        groups,
        n,
        k,
        BLOCK_N=32,
        BLOCK_M=16,
        BLOCK_K=32,
        SILU_MUL=silu_mul,
        MAX_GROUPS=8,
        EARLY_START=False,
    )
    assert torch.isnan(out[m]).all()
    for group, weight in enumerate(w):
        rows = slice(starts[group], starts[group + 1])
        own = x[rows].numpy()
        expected = (
            silu_mul_reference(own, weight.numpy(), n) if silu_mul else own @ weight.numpy().T
        )
        np.testing.assert_allclose(out[rows], expected, rtol=1e-3, atol=1e-3)


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
