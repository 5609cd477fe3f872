"""tools/gemm_timings.py without a GPU: which tiles it tries, and what it takes for equal bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tools.gemm_choice import Role
from tools.gemm_timings import LoneTiles, TurnTimer
from tools.gpu_arrays import Arrays

OLD, SAME, OTHER = "stream_64x16x128_s4_w4", "stream_64x32x128_s4_w4", "stream_64x64x64_s6_w4"
TABLE: dict[str, Any] = {"segments": {"shapes": {"40x384": 2}}, "shapes": {}}
M = 32


class NumpyKernels:
    """Computes what stream tiles store; `wrong` changes the last bit of one sum of row `row`."""

    gemm_tiles = TABLE

    def __init__(self, wrong: str = "", row: int = 0, forms: tuple[str, ...] = ("bf16", "fp32")):
        self._wrong, self._row = wrong, row
        self._names = [f"gemm.{form}.{tile}" for form in forms for tile in (OLD, SAME, OTHER)]
        self._names.append("gemm_decode_bf16_64x8")

    def names(self) -> list[str]:
        return self._names

    def launch(self, name: str, grid: Any, threads: int, x: Any, w: Any, out: Any, *sizes: int):
        m, _, k, segment = sizes
        x, w = x.astype(np.float32), w.astype(np.float32)
        for index in range(len(out)):
            cut = slice(index * segment, min(k, (index + 1) * segment))
            # one row at a time: a matrix product may add up in another order for fewer rows
            sums = np.stack([w[:, cut] @ row[cut] for row in x])
            if self._wrong and name.endswith(self._wrong) and m > self._row:
                sums[self._row, 3] = np.nextafter(sums[self._row, 3], np.float32(np.inf))
            out[index] = sums


@pytest.fixture(autouse=True)
def one_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tools.gemm_timings.copies_for", lambda size: 1)


def lone(kernels: NumpyKernels) -> LoneTiles:
    timer: TurnTimer = object()  # type: ignore[assignment]
    return LoneTiles(kernels, Arrays(np, 1), timer)


@pytest.mark.parametrize(
    "role",
    [Role("out", "fp32", 40, 384, segmented=True), Role("qgkv", "bf16", 40, 384)],
    ids=["segments", "bf16"],
)
def test_tiles_that_write_the_same_have_equal_bits(role: Role) -> None:
    assert lone(NumpyKernels(OTHER)).same_bits(role, M, OLD, SAME)


@pytest.mark.parametrize("row", [0, M - 1])
def test_one_bit_of_one_row_is_another_tile_s(row: int) -> None:
    role = Role("out", "fp32", 40, 384, segmented=True)
    assert not lone(NumpyKernels(OTHER, row)).same_bits(role, M, OLD, OTHER)


def test_a_difference_that_bf16_hides_shows_in_fp32() -> None:
    role = Role("qgkv", "bf16", 40, 384)
    assert lone(NumpyKernels(OTHER, forms=("bf16",))).same_bits(role, M, OLD, OTHER)
    assert not lone(NumpyKernels(OTHER)).same_bits(role, M, OLD, OTHER)


def test_tiles_of_far_more_or_fewer_rows_are_not_tried() -> None:
    role = Role("qgkv", "bf16", 40, 384)
    kernels = NumpyKernels()
    assert set(lone(kernels).serving(role, 16)) == {"decode_64x8", OLD, SAME}
    assert set(lone(kernels).serving(role, 128)) == {OTHER}


def test_tiles_whose_step_does_not_divide_k_are_not_tried() -> None:
    assert lone(NumpyKernels()).serving(Role("qgkv", "bf16", 40, 192), 64) == [OTHER]
