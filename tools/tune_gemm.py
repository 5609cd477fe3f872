"""Measures compiled GEMM tiles at the shapes of Qwen3.5 and writes the better ones to
triton_aot/tiles/<table>.json.

    python triton_aot/build.py --arch sm_90 --candidates
    python -m tools.tune_gemm [--models 4B 9B ...] [--rows 32 64 128 256] [--seconds 120]
                              [--segments] [--out FILE]

For each model, and for the buckets of M that end at --rows:

1. every compiled tile that can serve a shape, alone; the fastest few go on if the bits of what they
   write are those of the table's tile
2. up to 256 rows: role by role in the chain of a decode step's GEMMs and norms
3. of what is faster there, what also is in the engine's whole decode step: the old table, the new
   one and each role as it was

A tile gives way only to one that is faster by a margin in two turns beside it. Beyond 256 rows,
which only prompts have, both turns are alone. What the time does not suffice for stays as it was.
--segments first measures into how many segments `out` and `down` are cut, at 8 and 64 rows with the
sum that follows; another number changes the bits of every result.
Run it on an idle card.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from tools.gpu_check import ROOT, make_importable
from tools.model_shapes import SIZES

LAST_M = 8192
"""Stands for the last bucket."""
TILES = ROOT / "triton_aot/tiles"


def changes(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """Rows of shapes of which a tile is another, or that are new."""
    shapes = {key: row for key, row in new["shapes"].items() if row != old["shapes"].get(key)}
    return [f"{key}: {' '.join(row)}" for key, row in shapes.items()]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["4B"], choices=SIZES)
    parser.add_argument("--rows", nargs="*", type=int, default=[32, 64, 128, 256])
    parser.add_argument("--seconds", type=float, default=120.0, help="for each model")
    parser.add_argument("--segments", action="store_true")
    parser.add_argument("--out", type=Path, default=None, help="a file or a folder")
    options = parser.parse_args()
    make_importable()
    import cupy

    from deltaserve.engine.ops.cuda.loader import KernelLibrary
    from tools.gemm_timings import WithTable
    from tools.gemm_tuning import Tuning

    kernels = KernelLibrary()
    old: dict[str, Any] = kernels.gemm_tiles
    ends = [*old["buckets"], LAST_M]
    if not set(options.rows) <= set(ends):
        parser.error(f"--rows are ends of buckets: {' '.join(map(str, ends))}")
    sys.path.insert(0, str(ROOT / "triton_aot"))
    name = importlib.import_module("gemm_tiles").TABLES[kernels.arch]
    out = options.out or Path(os.environ.get("OUT", TILES))
    if out.is_dir():
        out = out / f"{name}.json"
    table = old
    measured: list[dict[str, Any]] = []
    for model in options.models:
        tuning = Tuning(cupy, WithTable(kernels, table), model, options.seconds)
        try:
            if options.segments:
                tuning.segments()
            tuning.run(sorted(set(options.rows)))
        finally:  # what ends a run takes nothing back of what it has found
            table, measured = tuning.table, measured + tuning.measured
            out.write_text(json.dumps(table, indent=2) + "\n")
            if out.parent != TILES:
                figures = out.with_name(f"{out.stem}_measured.json")
                figures.write_text(json.dumps(measured) + "\n")
    print("\n".join([*changes(old, table), f"wrote {out}"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
