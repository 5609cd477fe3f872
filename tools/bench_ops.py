"""Times every op of a model on the GPU, and the GEMMs of a whole decode step, against the roofline.

    python triton_aot/build.py --arch sm_90
    python -m tools.bench_ops [--models 4B 9B 27B] [--batch 1 8 64 256] [--tokens 128 1024 8192]
                              [--only WORD ...] [--out FILE]

Each time is the mean over launches in one CUDA graph that rotates among at least 400 MB of
weights, states or KV blocks (tools/op_benchmarks.py). The roofline is the larger of the bytes an op
must move at the card's read bandwidth and its matrix FLOPs at the matrix rate. `--only` takes parts
of op names. Under load the clocks fall, so each case has a pause before it (--pause) and then runs
for 20 ms before it is timed. Prints a table; the JSON also names the kernels of each op with their
hashes in the manifest.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.gpu_check import ROOT, build_if_missing, gpu_arch, make_importable
from tools.gpu_timing import copies_for, graph_microseconds
from tools.model_shapes import SIZES, hf_text_config

READ_BANDWIDTH = 4.5e12
MATRIX_RATE = 790e12
"""Measured on an H200: plain reads, and the fastest large bf16 GEMM."""
MAX_COPIES = 64
MIN_LAUNCHES = 8
SETTLE = 20e3
PAUSE = "seconds before each case: what the one before drew lowers the clocks of the next"


class RecordingKernels:
    """A kernel library that notes the names of what it launches."""

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.launched: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)

    def launch(self, name: str, *args: Any) -> None:
        self.launched.add(name)
        self._kernels.launch(name, *args)


def roofline_microseconds(moved: float, flops: float) -> float:
    return 1e6 * max(moved / READ_BANDWIDTH, flops / MATRIX_RATE)


def timed(cupy: Any, case: Any, kernels: RecordingKernels, pause: float) -> dict[str, Any]:
    """A row of the result."""
    copies = min(copies_for(case.rotated), MAX_COPIES) if case.rotated else 1
    made = [case.make() for _ in range(copies)]
    launches = [launch for group in made for launch in group] * max(1, MIN_LAUNCHES // copies)
    kernels.launched.clear()
    cupy.cuda.Device().synchronize()
    time.sleep(pause)
    us = graph_microseconds(cupy, launches, settle_microseconds=SETTLE) * len(made[0])
    return {
        "op": case.op,
        "size": case.size,
        "us": us,
        "GB/s": case.moved / us / 1e3,
        "TF/s": case.flops / us / 1e6,
        "roofline": roofline_microseconds(case.moved, case.flops) / us,
        "kernels": sorted(kernels.launched),
    }


def step_launches(bench: Any, rows: int, norms: bool) -> list[Any]:
    """The GEMMs of one decode step in the model's order, each with the weights of its layer; with
    `norms` also the sums and norms between them."""
    from tools.gpu_op_checks import EPS

    c, ops, a = bench.config, bench.ops, bench.arrays
    h, f = c.hidden_size, c.intermediate_size
    hidden, residual, norm, gated = a.act(rows, h), a.act(rows, h), a.act(h), a.act(rows, f)
    launches: list[Any] = []

    def gemm(op: Any, n: int, x: Any, out: Any) -> None:
        launches.append(functools.partial(op, x, bench.weight(n, x.shape[1]), out))

    def narrow(x: Any) -> None:
        parts = a.poisoned(ops.num_segments(h, x.shape[1]), rows, h, dtype="float32")
        gemm(ops.linear_partials, h, x, parts)
        args = (parts, residual, norm, EPS, hidden)
        if norms:
            launches.append(functools.partial(ops.add_rms_norm_partials, *args))

    for kind in c.layer_types:
        linear = kind == "linear_attention"
        n = c.linear_in_size if linear else c.attention_in_size
        gemm(ops.linear_decode, n, hidden, a.poisoned(rows, n))
        narrow(a.act(rows, c.value_size if linear else c.num_query_heads * c.head_dim))
        gemm(ops.linear_silu_mul_decode, 2 * f, hidden, gated)
        narrow(gated)
    logits = a.poisoned(rows, c.vocab_size, dtype="float32")
    gemm(ops.lm_head, c.vocab_size, hidden, logits)
    return launches


def step_case(bench: Any, rows: int, norms: bool) -> Any:
    from tools.op_benchmarks import Case

    c = bench.config
    h, f = c.hidden_size, c.intermediate_size
    mixers = {
        "linear_attention": c.linear_in_size + c.value_size,
        "full_attention": c.attention_in_size + c.num_query_heads * c.head_dim,
    }
    weights = h * (c.vocab_size + sum(mixers[kind] + 3 * f for kind in c.layer_types))

    def make() -> list[Any]:
        launches = step_launches(bench, rows, norms)

        def step() -> None:
            for launch in launches:
                launch()

        return [step]

    name = "GEMMs and norms of a step" if norms else "GEMMs of a step"
    return Case(name, f"B={rows}", 2.0 * weights, 2.0 * rows * weights, 2 * weights, make)


def cases(bench: Any, options: argparse.Namespace) -> Iterator[Any]:
    from tools.op_benchmarks import decode_cases, prefill_cases

    for rows in options.batch:
        contexts = {1: (1100, 262_144), 64: (1100, 8192)}.get(rows, (1100,))
        yield from decode_cases(bench, rows, contexts)
    for tokens in options.tokens:
        yield from prefill_cases(bench, tokens)
    for rows in options.batch:
        yield step_case(bench, rows, False)
        yield step_case(bench, rows, True)


def print_table(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        label = f"{row['model']:5s}{row['op']:42s}{row['size']:22s}"
        rates = f"{row['GB/s']:7.0f} GB/s {row['TF/s']:6.1f} TF/s {100 * row['roofline']:5.1f} %"
        print(f"{label}{row['us']:10.2f} us {rates}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["4B", "9B", "27B"], choices=SIZES)
    parser.add_argument("--batch", nargs="*", type=int, default=[1, 8, 64, 256])
    parser.add_argument("--tokens", nargs="*", type=int, default=[128, 1024, 8192])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--pause", type=float, default=0.3, help=PAUSE)
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    make_importable()
    import cupy

    from deltaserve.engine.config import ModelConfig
    from deltaserve.engine.ops.cuda.loader import KernelLibrary, read_manifest
    from deltaserve.engine.ops.cuda.ops import CudaOps, OpsShape
    from tools.gpu_arrays import Arrays
    from tools.op_benchmarks import Bench

    arch = gpu_arch()
    build_if_missing(arch)
    kernels = RecordingKernels(KernelLibrary())
    pool = cupy.get_default_memory_pool()
    results: list[dict[str, Any]] = []
    failures: list[str] = []
    out = options.out or Path(os.environ.get("OUT", ROOT / "bench/results")) / "bench_ops.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    manifest = read_manifest()
    entries = manifest["archs"][arch]["kernels"]
    for model in options.models:
        c = ModelConfig.from_hf(hf_text_config(model))
        most = max(options.batch, default=1), max(options.tokens, default=1)
        shape = OpsShape(c.num_query_heads, c.num_value_heads, *most)
        bench = Bench(CudaOps(kernels, shape, cupy.empty), Arrays(cupy, 1), c)
        for case in cases(bench, options):
            if options.only and not any(word in case.op for word in options.only):
                continue
            try:
                results.append({"model": model, **timed(cupy, case, kernels, options.pause)})
            except Exception as error:
                failures.append(f"{model} {case.op} {case.size}: {error!r}")
            pool.free_all_blocks()
        print(f"{model}: {len(results)} rows", file=sys.stderr, flush=True)
        used = sorted({name for row in results for name in row["kernels"]})
        summary = {
            "arch": arch,
            "compilers": manifest["compilers"],
            "kernels": {name: entries[name]["hash"] for name in used},
            "failures": failures,
            "pause": options.pause,
            "rows": results,
        }
        out.write_text(json.dumps(summary, indent=1) + "\n")
    print_table(results)
    if failures:
        print("\n".join(["FAILED", *failures]))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
