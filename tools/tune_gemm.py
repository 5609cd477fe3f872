"""Measures every compiled GEMM tile at the shapes of Qwen3.5 and writes the best ones to
triton_aot/tiles/<table>.json.

    python triton_aot/build.py --arch sm_90 --candidates
    python -m tools.tune_gemm [--models 4B 9B ...] [--out FILE]

For each shape and bucket of M the fastest tile at the bucket's upper end, in a CUDA graph over
rotated weights. The number of K segments is measured first, at M = 8 and 64 together, with the
ordered sum that follows (add_rms_norm_partials); it is then fixed for all M. Run on an idle card.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.gpu_check import ROOT, make_importable
from tools.gpu_timing import copies_for, graph_microseconds
from tools.model_shapes import SIZES, hf_text_config

LARGE_M = 8192  # stands for the last bucket
DECODE_M = 256
SEGMENT_STEP = 128
MAX_SEGMENTS = 4
CUDA_TILE = "decode_8"
SETTLE = 20e3
EPS = 1e-6


def shapes_of(model: str) -> list[tuple[str, int, int]]:
    """(form, N, K); "partials" is both the decode form and, as bf16, the prompt's."""
    from deltaserve.engine.config import ModelConfig

    c = ModelConfig.from_hf(hf_text_config(model))
    h, f, query_size = c.hidden_size, c.intermediate_size, c.num_query_heads * c.head_dim
    narrow = [(h, c.value_size), (h, query_size), (h, f)]
    shapes = [("bf16", c.linear_in_size, h), ("bf16", c.attention_in_size, h)]
    shapes += [("silu_mul", f, h), ("fp32", c.vocab_size, h)]
    shapes += [("partials", n, k) for n, k in narrow] + [("bf16", n, k) for n, k in narrow]
    return list(dict.fromkeys(shapes))


class Tuner:
    """Times tiles; every figure it makes is kept in `measured`."""

    def __init__(self, cupy: Any, kernels: Any, arrays: Any) -> None:
        from deltaserve.engine.ops.cuda.gemm import Gemm

        self._cupy, self._kernels, self._arrays = cupy, kernels, arrays
        self._gemm = Gemm(kernels)
        self._weights: dict[tuple[int, int], list[Any]] = {}
        self._settle = 0.0
        self.measured: list[dict[str, Any]] = []

    def tiles(self, form: str) -> list[str]:
        prefix = f"gemm.{form}."
        triton = [n.removeprefix(prefix) for n in self._kernels.names() if n.startswith(prefix)]
        return [CUDA_TILE, *triton]

    def rotated(self, rows: int, k: int) -> list[Any]:
        """Weights [rows, k], more of them than the cache holds; those of one shape at a time."""
        if (rows, k) not in self._weights:
            self._weights.clear()
            count = copies_for(2 * rows * k)
            self._weights[rows, k] = [
                self._arrays.filled(rows, k, scale=k**-0.5) for _ in range(count)
            ]
            self._settle = SETTLE
        return self._weights[rows, k]

    def time(self, form: str, name: str, m: int, n: int, k: int, segments: int = 1) -> float:
        """Microseconds, with the ordered sum where there are segments; inf where it cannot run."""
        from deltaserve.engine.ops.cuda.gemm import named_tile

        tile = named_tile(form, name)
        segment = -(-k // segments // SEGMENT_STEP) * SEGMENT_STEP
        if k % tile.block_k or segment % tile.block_k:
            return float("inf")
        if tile.rows > max(2 * m, 16) or tile.rows < min(m, 128) // 2:
            return float("inf")  # mostly padding, or weights read again and again
        a, gemm = self._arrays, self._gemm
        weights = self.rotated(2 * n if form == "silu_mul" else n, k)
        x = a.filled(m, k)
        out = self._cupy.empty((segments, m, n), "float32" if form == "fp32" else x.dtype)
        launches: list[Callable[[], None]] = [
            functools.partial(gemm.launch_tile, tile, x, w, out, n, segment, segments)
            for w in weights
        ]
        launches *= max(1, 8 // len(weights))
        us = graph_microseconds(self._cupy, launches, 1000.0, self._settle)
        self._settle = 0.0
        self.measured.append(
            {"form": form, "tile": name, "M": m, "N": n, "K": k, "segments": segments, "us": us}
        )
        return us

    def reduce_time(self, m: int, n: int, segments: int) -> float:
        """Microseconds of the residual addition and norm that sum the segments."""
        from deltaserve.engine.ops.cuda import norm

        a = self._arrays
        arrays = (a.fp32(segments, m, n), a.act(m, n), a.act(n), EPS, a.act(m, n))
        launch = functools.partial(norm.add_rms_norm_partials, self._kernels, *arrays)
        return graph_microseconds(self._cupy, [launch] * 32, 1000.0)

    def best_row(self, form: str, n: int, k: int, buckets: list[int], segments: int) -> list[str]:
        """The fastest tile for each bucket of M and for larger M."""
        row: list[str] = []
        for m in [*buckets, LARGE_M]:
            if m > DECODE_M and form == "fp32":
                row.append(row[-1])
                continue
            times = {name: self.time(form, name, m, n, k, segments) for name in self.tiles(form)}
            row.append(min(times, key=lambda name: times[name]))
            print(f"{form} {n}x{k} M={m}: {times[row[-1]]:.2f} us {row[-1]}", flush=True)
        return row

    def best_segments(self, n: int, k: int) -> int:
        totals = {}
        for segments in range(1, MAX_SEGMENTS + 1):
            total = 0.0
            for m in (8, 64):
                gemm = min(self.time("fp32", t, m, n, k, segments) for t in self.tiles("fp32"))
                total += gemm + self.reduce_time(m, n, segments)
            totals[segments] = total
        print(f"segments {n}x{k}: {totals}", flush=True)
        return min(totals, key=lambda segments: totals[segments])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["4B"], choices=SIZES)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    make_importable()
    import cupy

    from deltaserve.engine.ops.cuda.loader import KernelLibrary
    from tools.gpu_arrays import Arrays

    sys.path.insert(0, str(ROOT / "triton_aot"))
    tables = importlib.import_module("gemm_tiles").TABLES

    kernels = KernelLibrary()
    table = json.loads(json.dumps(kernels.gemm_tiles))
    tuner = Tuner(cupy, kernels, Arrays(cupy, 1))
    shapes = dict.fromkeys(shape for model in options.models for shape in shapes_of(model))
    for form, n, k in shapes:
        segments, stored = 1, form
        if form == "partials":
            stored = "fp32"
            segments = table["segments"]["shapes"][f"{n}x{k}"] = tuner.best_segments(n, k)
        row = tuner.best_row(stored, n, k, table["buckets"], segments)
        table["shapes"][f"{stored}:{n}x{k}"] = row
    out = options.out or Path(os.environ.get("OUT", ROOT / "triton_aot/tiles"))
    if out.is_dir():
        out = out / f"{tables[kernels.arch]}.json"
    out.write_text(json.dumps(table, indent=2) + "\n")
    measured = out.with_name(out.stem + "_measured.json")
    if out.parent != ROOT / "triton_aot/tiles":
        measured.write_text(json.dumps(tuner.measured))
    print(f"wrote {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
