"""GEMM: picks the kernel and tile for a shape, of cuda/gemm_decode.cu for few rows and of
triton_aot/kernels/gemm.py for more, and the order of its sums.

The tile may depend on the number of rows; the number of K segments may not. All kernels add up a
segment in the same order, so `linear` and `linear_decode` are the same function.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from ..base import MAX_SEGMENTS
from .kernels import Blocks, Kernels

Array = Any

_NAME = re.compile(r"(stream|persistent)_(\d+)x(\d+)x(\d+)_.*?(?:_x(\d))?")
_CUDA_NAME = re.compile(r"(decode|cluster)_(\d+)x(\d+)")
_CUDA_BLOCK_K, _CUDA_ROWS_A_WARP = 128, 16
"""As in cuda/gemm_decode.cu."""
_CLUSTER, _CLUSTER_BLOCK_K = 2, 64
_CLUSTER_WIDE, _CLUSTER_THREADS, _CLUSTER_WIDE_THREADS = 192, 288, 384
"""As in cuda/sm_90/gemm_cluster.cu."""
_SEGMENT_STEP = 128
"""Segments of K are multiples of this, which every tile's BLOCK_K divides."""


_GROUPED_TILES = ("stream_64x16x128_s4_w4", "stream_128x128x64_s3_w8")
_FEW_ROWS = 32
"""As in triton_aot/variants.py; the first tile for as many rows a group on average."""


class GemmTile(NamedTuple):
    kernel: str
    persistent: bool
    columns: int
    rows: int
    block_k: int
    threads: int
    """0: as many as it was compiled for."""
    maps: tuple[str, ...] = ()
    """What the kernel takes tensor maps of, in this order."""
    gates: int = 1
    """Weight rows of an output: 2 of SiLU*mul."""
    programs: int = 1
    """A multiprocessor, of a persistent tile."""
    cluster: int = 1
    """Blocks that have a tile together."""


class Gemm:
    """Launches GEMMs on one architecture."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels
        self._table = kernels.gemm_tiles
        self._chosen: dict[tuple[str, int, int, int], GemmTile] = {}

    def linear(self, x: Array, weight: Array, out: Array) -> None:
        """bf16 out."""
        self._launch("bf16", x, weight, out, weight.shape[0], 1)

    def linear_fp32(self, x: Array, weight: Array, out: Array) -> None:
        """fp32 out [M, N]."""
        self._launch("fp32", x, weight, out, weight.shape[0], 1)

    def linear_partials(self, x: Array, weight: Array, out: Array) -> None:
        """fp32 out [S, M, N], S = num_segments."""
        segments = self.num_segments(*weight.shape)
        assert out.shape[0] == segments
        self._launch("fp32", x, weight, out, weight.shape[0], segments)

    def linear_silu_mul(self, x: Array, weight: Array, out: Array) -> None:
        """bf16 out [M, N], weight [2 N, K]."""
        self._launch("silu_mul", x, weight, out, weight.shape[0] // 2, 1)

    def linear_grouped(self, x: Array, weights: Array, group_starts: Array, out: Array) -> None:
        """Rows group_starts[g] .. group_starts[g + 1] of x with weights[g]: x [M, K], weights
        [G, N, K], group_starts int32 [G + 1] from 0 to M, bf16 out [M, N]. A row's bits are those
        of `linear` with its weight."""
        self._launch_grouped("bf16", x, weights, group_starts, out, weights.shape[1])

    def linear_silu_mul_grouped(
        self, x: Array, weights: Array, group_starts: Array, out: Array
    ) -> None:
        """The same of `linear_silu_mul`: weights [G, 2 N, K]."""
        self._launch_grouped("silu_mul", x, weights, group_starts, out, weights.shape[1] // 2)

    def num_segments(self, n: int, k: int) -> int:
        """A constant of (architecture, N, K)."""
        rule = self._table["segments"]
        fixed: int | None = rule["shapes"].get(f"{n}x{k}")
        if fixed is not None:
            return fixed
        segments = 1
        while (
            2 * segments <= MAX_SEGMENTS
            and -(-n // rule["tile"]) * 2 * segments <= rule["max_programs"]
            and k // (2 * segments) >= rule["min_length"]
        ):
            segments *= 2
        return segments

    def tile_name(self, form: str, n: int, k: int, m: int) -> str:
        """The name of the tile for a shape."""
        table = self._table
        row = table["shapes"].get(f"{form}:{n}x{k}")
        if row is None:
            row = table["default"][form]["wide" if n >= table["wide_from"] else "narrow"]
        bucket = sum(m > end for end in table["buckets"])
        name: str = row[bucket]
        return name

    def _tile(self, form: str, n: int, k: int, m: int) -> GemmTile:
        bucket = sum(m > end for end in self._table["buckets"])
        key = (form, n, k, bucket)
        if key not in self._chosen:
            self._chosen[key] = named_tile(form, self.tile_name(form, n, k, m))
        return self._chosen[key]

    def _launch(
        self, form: str, x: Array, weight: Array, out: Array, n: int, segments: int
    ) -> None:
        m, k = x.shape
        assert weight.shape[1] == k and out.shape[-2:] == (m, n), (x.shape, weight.shape, out.shape)
        segment = -(-k // segments // _SEGMENT_STEP) * _SEGMENT_STEP
        self.launch_tile(self._tile(form, n, k, m), x, weight, out, n, segment, segments)

    def _launch_grouped(
        self, form: str, x: Array, weights: Array, group_starts: Array, out: Array, n: int
    ) -> None:
        (m, k), groups = x.shape, weights.shape[0]
        assert weights.shape[2] == k and out.shape == (m, n) and len(group_starts) == groups + 1
        few, many = _GROUPED_TILES
        tile = named_tile(form, few if m <= _FEW_ROWS * groups else many)
        kernel = tile.kernel.replace("gemm.", "gemm_grouped.", 1)
        assert k % tile.block_k == 0 and groups <= self._kernels.constant(kernel, "MAX_GROUPS")
        grid = (m // tile.rows + groups, -(-n // tile.columns), 1)
        self._kernels.launch(kernel, grid, 0, x, weights, out, group_starts, groups, n, k)

    def launch_tile(
        self,
        tile: GemmTile,
        x: Array,
        weight: Array,
        out: Array,
        n: int,
        segment: int,
        segments: int,
    ) -> None:
        """One GEMM with a given tile, which `_tile` or a test chose."""
        m, k = x.shape
        assert k % tile.block_k == 0 and segment % tile.block_k == 0, (tile, k, segment)
        row_tiles, column_tiles = -(-m // tile.rows), -(-n // tile.columns)
        if tile.persistent:
            programs = row_tiles * column_tiles * segments
            most = tile.programs * self._kernels.num_multiprocessors // tile.cluster
            grid = (min(programs, most) * tile.cluster, 1, 1)
        else:
            grid = (row_tiles, column_tiles, segments)
        if tile.maps:
            if tile.cluster > 1:  # whole 16-byte stores, and no empty segment
                assert n % 8 == 0 and segment * (segments - 1) < k, (tile, n, segment)
            shapes = {
                "x": Blocks(x, (m, k)),
                "w": Blocks(weight, (n, k) if tile.gates == 1 else (tile.gates, n, k)),
                "w rows": Blocks(weight, (tile.gates * n, k)),
                "out": Blocks(out, (m, n)),
            }
            maps = [shapes[name] for name in tile.maps]
            self._kernels.launch(tile.kernel, grid, tile.threads, *maps, out, m, n, k, segment)
            return
        self._kernels.launch(tile.kernel, grid, tile.threads, x, weight, out, m, n, k, segment)


def compiled_tiles(form: str, kernels: Iterable[str]) -> list[str]:
    """The names of the tiles of a form among those of kernels."""
    found = []
    for kernel in kernels:
        if kernel.startswith(f"gemm.{form}."):
            found.append(kernel.removeprefix(f"gemm.{form}."))
        for kind in ("decode", "cluster"):
            if kernel.startswith(f"gemm_{kind}_{form}_"):
                found.append(f"{kind}_{kernel.removeprefix(f'gemm_{kind}_{form}_')}")
    return found


def named_tile(form: str, name: str) -> GemmTile:
    """The tile of a name, for tools that try tiles one by one."""
    gates = 2 if form == "silu_mul" else 1
    if cuda := _CUDA_NAME.fullmatch(name):
        block_n, rows = map(int, cuda.groups()[1:])
        kernel = f"gemm_{cuda[1]}_{form}_{block_n}x{rows}"
        if cuda[1] == "cluster":
            threads = _CLUSTER_WIDE_THREADS if block_n > _CLUSTER_WIDE else _CLUSTER_THREADS
            shape = block_n // gates, rows, _CLUSTER_BLOCK_K, threads
            return GemmTile(kernel, True, *shape, ("x", "w rows"), gates, cluster=_CLUSTER)
        threads = block_n // _CUDA_ROWS_A_WARP * 32
        return GemmTile(kernel, False, block_n // gates, rows, _CUDA_BLOCK_K, threads)
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"no GEMM tile is named {name!r}")
    block_n, block_m, block_k = map(int, match.groups()[1:4])
    kernel, columns = f"gemm.{form}.{name}", block_n // gates
    if match[1] == "stream":
        return GemmTile(kernel, False, columns, block_m, block_k, 0)
    # as in triton_aot/variants.py: two products where the width is no power of two
    maps: tuple[str, ...] = ("x", "w", "w")
    if block_n & (block_n - 1) == 0:
        maps = ("x", "w") if form == "fp32" else ("x", "w", "out")
    programs = int(match[5] or 1)
    return GemmTile(kernel, True, columns, block_m, block_k, 0, maps, gates, programs)
