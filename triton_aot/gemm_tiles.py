"""Which GEMM tile serves which shape: reads tiles/*.json, names the tiles, knows no kernel.

A tile of Triton's is named `<kernel>_<BLOCK_N>x<BLOCK_M>x<BLOCK_K>_s<stages>_w<warps>`; BLOCK_N
counts weight rows. Persistent ones may have `_early` after that (the kernel starts early, as stream
tiles always do) and then `_x2` (two programs a multiprocessor). `decode_<BLOCK_N>x<BLOCK_M>` is a
kernel of cuda/gemm_decode.cu, `cluster_<BLOCK_N>x<BLOCK_M>` one of cuda/sm_90/gemm_cluster.cu. A
form is what a GEMM stores: "bf16", "fp32" (logits, or ordered partial sums) or "silu_mul".

tiles/<arch>.json, where tiles/<arch> is missing the file it is mapped to in `TABLES`:

    buckets    upper ends of M; a row of tiles has one tile for each, and one for larger M
    default    form -> "narrow" or "wide" -> row of tiles;  wide is N >= wide_from
    shapes     "<form>:<N>x<K>" -> row of tiles; tools/tune_gemm.py measures and writes these
    segments   how `linear_partials` cuts K: the largest power of two S with
               ceil(N / tile) * S <= max_programs and K / S >= min_length; "shapes" overrides
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FORMS = ("bf16", "fp32", "silu_mul")

TABLES = {
    "sm_80": "ampere",
    "sm_86": "small_shared",
    "sm_89": "small_shared",
    "sm_90": "sm_90",
    "sm_100": "blackwell",
    "sm_103": "blackwell",
    "sm_120": "small_shared",
    "sm_121": "small_shared",
}

_NAME = re.compile(r"(stream|persistent)_(\d+)x(\d+)x(\d+)_s(\d+)_w(\d+)(_early)?(?:_x([2-4]))?")
_CUDA_NAME = re.compile(r"(decode|cluster)_\d+x\d+")


@dataclass(frozen=True)
class Tile:
    kernel: str  # stream or persistent
    block_n: int
    block_m: int
    block_k: int
    stages: int
    warps: int
    early: bool = False
    programs: int = 1
    """A multiprocessor, of a persistent tile."""

    @classmethod
    def parse(cls, name: str) -> Tile:
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"no GEMM tile is named {name!r}")
        early, programs = match.groups()[6:]
        if match[1] == "stream" and (early or programs):
            raise ValueError(f"{name}: what only persistent tiles may have")
        numbers = map(int, match.groups()[1:6])
        return cls(match[1], *numbers, bool(early), int(programs or 1))

    @property
    def parts(self) -> tuple[int, int]:
        """block_n as one or two powers of two, the larger first: a persistent tile's two products.
        ValueError where it takes more."""
        main = 1 << (self.block_n.bit_length() - 1)
        extra = self.block_n - main
        if extra & (extra - 1):
            raise ValueError(f"{self.name}: {self.block_n} rows are no sum of two powers of two")
        return main, extra

    @property
    def name(self) -> str:
        blocks = f"{self.block_n}x{self.block_m}x{self.block_k}"
        options = "_early" * self.early + f"_x{self.programs}" * (self.programs > 1)
        return f"{self.kernel}_{blocks}_s{self.stages}_w{self.warps}{options}"


def is_cuda(name: str) -> bool:
    """Whether a tile is a kernel of cuda/, which needs no variant."""
    return _CUDA_NAME.fullmatch(name) is not None


def read_table(arch: str) -> dict[str, Any]:
    """The table of an architecture; ValueError where a row does not have a tile for each bucket."""
    path = Path(__file__).parent / "tiles" / f"{TABLES[arch]}.json"
    table: dict[str, Any] = json.loads(path.read_text())
    for form, row in rows(table):
        if form not in FORMS or len(row) != len(table["buckets"]) + 1:
            raise ValueError(
                f"{path.name}: a row of {form} needs {len(table['buckets']) + 1} tiles"
            )
        for name in row:
            if not is_cuda(name):
                Tile.parse(name)
    return table


def rows(table: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """(form, row of tile names) of every row of a table."""
    found = [(form, row) for form, widths in table["default"].items() for row in widths.values()]
    return found + [(shape.partition(":")[0], row) for shape, row in table["shapes"].items()]


def used_tiles(table: dict[str, Any]) -> set[tuple[str, str]]:
    """(form, tile name) of every Triton kernel that a table can choose."""
    return {(form, name) for form, row in rows(table) for name in row if not is_cuda(name)}


# Tiles that tools/tune_gemm.py tries besides those in use; compiled with --candidates.
CANDIDATES = (
    "stream_64x16x128_s3_w4",
    "stream_64x16x128_s4_w4",
    "stream_64x16x128_s6_w4",
    "stream_64x32x128_s4_w4",
    "stream_64x32x256_s3_w4",
    "stream_128x32x128_s4_w8",
    "stream_64x64x64_s6_w4",
    "stream_64x64x128_s4_w4",
    "stream_128x64x64_s4_w4",
    "stream_64x128x64_s4_w4",
    "stream_128x128x64_s4_w8",
    "persistent_32x64x128_s4_w4_early_x2",
    "persistent_48x64x64_s7_w4_early_x2",
    "persistent_64x64x64_s8_w4",
    "persistent_64x64x128_s6_w4_early",
    "persistent_80x64x128_s5_w4_early",
    "persistent_96x64x128_s5_w4",
    "persistent_96x64x128_s5_w4_early",
    "persistent_144x64x64_s7_w4",
    "persistent_144x64x64_s7_w4_early",
    "persistent_144x64x128_s4_w4_early",
    "persistent_160x64x64_s7_w4",
    "persistent_160x64x128_s4_w4",
    "persistent_96x128x64_s7_w4",
    "persistent_96x128x64_s7_w8",
    "persistent_128x128x64_s5_w8",
    "persistent_144x128x64_s5_w8",
    "persistent_128x128x64_s3_w8_x2",
    "persistent_160x128x64_s5_w4",
    "persistent_160x128x64_s5_w4_early",
    "persistent_160x128x64_s5_w8",
    "persistent_192x128x64_s5_w8",
    "persistent_256x128x64_s3_w8",
    "persistent_256x128x64_s4_w8",
    "persistent_288x128x64_s4_w8",
    "persistent_288x128x64_s4_w8_early",
    "persistent_128x256x64_s3_w8",
    "persistent_160x256x64_s4_w8",
    "persistent_192x256x64_s4_w8",
)
