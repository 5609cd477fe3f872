"""cuda/sm_90/gemm_cluster.cu on the CPU (see hopper_on_cpu.h), through `Gemm`, against float64."""

from __future__ import annotations

import re
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from deltaserve.engine.ops.cuda.gemm import Gemm, compiled_tiles, named_tile

from .cuda_on_cpu import CUDA, CpuKernels, dynamic_shared, kernels, tensor_maps

pytestmark = pytest.mark.aot

BF16 = ml_dtypes.bfloat16
TEXT = (CUDA / "sm_90/gemm_cluster.cu").read_text()
NAMES = [name.removesuffix("_kernel") for name in kernels(TEXT)]
TILES = [(f, tile) for f in ("bf16", "fp32", "silu_mul") for tile in compiled_tiles(f, NAMES)]
NARROWEST = [
    ("bf16", "cluster_160x256"),
    ("fp32", "cluster_128x256"),
    ("silu_mul", "cluster_288x256"),
]
GUARD = 64
"""Elements before and after a result."""


@pytest.fixture(scope="module")
def cpu() -> CpuKernels:
    return CpuKernels()


@pytest.fixture
def gemm(cpu: CpuKernels, monkeypatch: pytest.MonkeyPatch) -> Gemm:
    monkeypatch.setattr(cpu, "num_multiprocessors", 2)
    return Gemm(cpu)


def operands(form: str, m: int, n: int, k: int) -> tuple[np.ndarray, np.ndarray]:
    """x [m, k] and w; a row of x is the same for any m."""
    w = np.random.default_rng(1).standard_normal((2 * n if form == "silu_mul" else n, k))
    x = np.random.default_rng(2).standard_normal((m, k))
    return x.astype(BF16), (w * k**-0.5).astype(BF16)


def run(
    gemm: Gemm, form: str, tile: str, m: int, n: int, k: int, segment: int | None = None
) -> np.ndarray:
    """[segments, m, n]; what lies around the result stays poisoned."""
    segment = segment or k
    parts = -(-k // segment)
    x, w = operands(form, m, n, k)
    dtype: Any = np.float32 if form == "fp32" else BF16
    memory = np.full(parts * m * n + 2 * GUARD, np.nan, dtype)
    out = memory[GUARD:-GUARD].reshape(parts, m, n)
    gemm.launch_tile(named_tile(form, tile), x, w, out, n, segment, parts)
    around = np.concatenate([memory[:GUARD], memory[-GUARD:]])
    assert np.isnan(around.astype(np.float32)).all()
    return out


def expected(form: str, m: int, n: int, k: int, segment: int | None = None) -> np.ndarray:
    """Of `run`, in float64."""
    segment = segment or k
    x, w = (array.astype(np.float64) for array in operands(form, m, n, k))
    spans = [slice(begin, begin + segment) for begin in range(0, k, segment)]
    products = np.stack([x[:, span] @ w[:, span].T for span in spans])
    if form == "silu_mul":
        gate, up = products[..., :n], products[..., n:]
        products = gate / (1 + np.exp(-gate)) * up
    return products


def assert_close(form: str, actual: np.ndarray, wanted: np.ndarray) -> None:
    """Of the whole as in test_gemm_decode.py; of each row to twice that, so that one that is wrong
    is not lost among the others."""
    tolerance = {"fp32": 1e-5, "bf16": 4e-3, "silu_mul": 8e-3}[form]
    error = actual.astype(np.float64) - wanted
    assert np.linalg.norm(error) <= tolerance * np.linalg.norm(wanted)
    rows = np.linalg.norm(error, axis=-1) / np.linalg.norm(wanted, axis=-1)
    assert rows.max() <= 2 * tolerance


@pytest.mark.parametrize(("form", "tile"), TILES)
def test_each_kernel(gemm: Gemm, form: str, tile: str) -> None:
    """Rows and columns past the last whole tile, and more tiles than the one cluster; 192 of K are
    fewer steps than a ring has."""
    shape = 300, 328, 192
    assert_close(form, run(gemm, form, tile, *shape), expected(form, *shape))


@pytest.mark.parametrize(("form", "tile"), NARROWEST)
@pytest.mark.parametrize("m", [1, 130, 256, 600])
def test_rows(gemm: Gemm, form: str, tile: str, m: int) -> None:
    """One block with none, one with few, both full, three tiles."""
    assert_close(form, run(gemm, form, tile, m, 72, 64), expected(form, m, 72, 64))


@pytest.mark.parametrize(("form", "tile"), NARROWEST)
@pytest.mark.parametrize("n", [8, 120, 128, 136])
def test_columns(gemm: Gemm, form: str, tile: str, n: int) -> None:
    assert_close(form, run(gemm, form, tile, 5, n, 128), expected(form, 5, n, 128))


@pytest.mark.parametrize(("form", "tile"), NARROWEST)
@pytest.mark.parametrize("k", [64, 256, 384, 448, 1280])
def test_stages_come_round(gemm: Gemm, form: str, tile: str, k: int) -> None:
    """1, 4, 6, 7 and 20 steps through rings of 4 and 6."""
    assert_close(form, run(gemm, form, tile, 140, 40, k), expected(form, 140, 40, k))


@pytest.mark.parametrize(("form", "tile"), NARROWEST)
@pytest.mark.parametrize("multiprocessors", [2, 5])
def test_rings_run_across_tiles(
    gemm: Gemm,
    cpu: CpuKernels,
    form: str,
    tile: str,
    multiprocessors: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One cluster and two have 15 tiles, each of fewer steps than a ring or of more."""
    monkeypatch.setattr(cpu, "num_multiprocessors", multiprocessors)
    grids = []
    launch = cpu.launch
    monkeypatch.setattr(cpu, "launch", lambda *args: (grids.append(args[1]), launch(*args)))
    for k in (192, 448):
        shape = 1100, 328, k
        assert_close(form, run(gemm, form, tile, *shape), expected(form, *shape))
    assert grids == [(multiprocessors // 2 * 2, 1, 1)] * 2


@pytest.mark.parametrize(("k", "segment"), [(192, 64), (576, 192), (1088, 384)])
def test_each_segment_sums_its_own_part_of_k(gemm: Gemm, k: int, segment: int) -> None:
    """Three; the last one of 1088 is of 320."""
    actual = run(gemm, "fp32", "cluster_128x256", 270, 136, k, segment)
    assert actual.shape[0] == 3
    assert_close("fp32", actual, expected("fp32", 270, 136, k, segment))


@pytest.mark.parametrize(("form", "tile"), NARROWEST)
def test_the_bits_are_those_of_the_kernel_for_few_rows(gemm: Gemm, form: str, tile: str) -> None:
    """The emulated tensor cores of both add up in the same order: what is shown is that the kernels
    hand them the same products in the same order, and round alike."""
    shape = 19, 104, 640
    bits = (run(gemm, form, t, *shape).tobytes() for t in (tile, "decode_64x8"))
    assert next(bits) == next(bits)


@pytest.mark.parametrize(("form", "tile"), NARROWEST)
def test_a_row_does_not_depend_on_the_others(gemm: Gemm, form: str, tile: str) -> None:
    few, many = (run(gemm, form, tile, m, 24, 256)[0] for m in (5, 262))
    assert few.tobytes() == many[:5].tobytes()


# ---- what the build and the host know of the kernels ---------------------------------------------


def widths_and_stages() -> dict[str, tuple[int, int]]:
    pattern = r"(\w+)_kernel\([^{]*\{\s*gemm_cluster<Form::(\w+), (\d+), (\d+)>"
    found = {}
    for name, form, width, stages in re.findall(pattern, TEXT):
        assert name == f"gemm_cluster_{form.lower()}_{width}x256"
        found[name] = int(width), int(stages)
    assert list(found) == NAMES
    return found


def test_every_kernel_says_how_much_shared_memory_it_takes() -> None:
    """A ring, its barriers, and what aligns it; at most 227 KiB."""
    wanted = {
        name: stages * ((128 + width) * 64 * 2 + 2 * 8) + 1024
        for name, (width, stages) in widths_and_stages().items()
    }
    assert dynamic_shared(TEXT, True) == wanted and max(wanted.values()) <= 227 * 1024


def test_the_maps_of_a_kernel_bring_a_blocks_rows_and_half_the_weight_rows() -> None:
    cuts = {name: [cut["block_size"] for cut in cuts] for name, cuts in tensor_maps(TEXT).items()}
    assert cuts == {n: [[128, 64], [w // 2, 64]] for n, (w, _) in widths_and_stages().items()}


def test_a_kernel_is_launched_with_the_threads_it_is_bound_to() -> None:
    """As a third warpgroup, whole, where the tile is wide (`setmaxnreg`), else as one warp."""
    bounds = re.findall(r"__launch_bounds__\(THREADS<(\d+)>, 1\)\s+(\w+)_kernel\(", TEXT)
    assert {name: int(width) for width, name in bounds} == {
        name: width for name, (width, _) in widths_and_stages().items()
    }
    for form, name in TILES:
        tile = named_tile(form, name)
        wide = tile.columns * tile.gates > 192
        assert (tile.threads, tile.cluster) == (384 if wide else 288, 2)
