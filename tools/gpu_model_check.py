"""Checks the whole model on the GPU of this machine: the demo model against the NumPy ops, random
weights of the true sizes against transformers, and engine times.

    python -m tools.gpu_model_check [--sizes 0.8B 4B] [--only demo parity mistakes time]

Sections run one by one and a failure in one does not stop the others. Results go to the JSON file
as they come; the table is printed last. Exits with 1 if a check failed. `--plumbing` runs it all on
the CPU with a small model, which checks this script and no kernel. transformers is needed for
all but `demo`.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

from tools.gpu_check import ROOT, build_if_missing, gpu_arch, make_importable

LENGTHS = (1, 7, 64, 128, 4097, 8192)
SMALL_LENGTHS = (1, 7, 64, 130)
TIMED_SIZE = "4B"
EXACT_SIZES = ("0.8B", "2B", "4B", "9B", "small")
"""Of these an fp32 copy fits beside the rest."""


class Checks:
    """Runs sections, keeps their rows by name, and writes all after each."""

    def __init__(self, out: Path) -> None:
        self._out = out
        self.results: dict[str, Any] = {}
        self.failures: list[str] = []

    def run(self, name: str, rows: Callable[[], Iterator[dict[str, Any]]]) -> None:
        began = time.monotonic()
        done: list[dict[str, Any]] = []
        try:
            for row in rows():
                done.append({**row, "at_s": round(time.monotonic() - began, 1)})
        except Exception as error:
            traceback.print_exc()
            self.failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
        self.failures += [f"{name}: {row}" for row in done if not row.get("ok", True)]
        seconds = time.monotonic() - began
        self.results[name] = {"seconds": seconds, "rows": done}
        print(f"{name}: {len(done)} rows, {seconds:.1f} s", flush=True)
        summary = {"failures": self.failures, "sections": self.results}
        self._out.write_text(json.dumps(summary, indent=1, default=float))

    def print_table(self) -> None:
        for name, section in self.results.items():
            for row in section["rows"]:
                mark = "" if row.get("ok", True) else "  FAILED"
                print(f"{name:14s} {_line(row)}{mark}")
        print("\n".join(["FAILED", *self.failures] if self.failures else ["all checks passed"]))


def _line(row: dict[str, Any]) -> str:
    if "ours" in row:
        cells = [f"prompt {row['prompt']:5d}"]
        for name in ("ours", "prefill", "decode", "itself"):
            v = row[name]
            cells.append(
                f"{name} mean {v['mean']:.4f} p99 {v['p99']:.3f} regret {v['regret']:.3f} "
                f"rms {v['rms']:.4f}"
            )
        cells += [f"{name} from fp32 {rms:.4f}" for name, rms in row["from_fp32"].items()]
        return " | ".join(cells)
    return " ".join(
        f"{key}={value:.4g}" if isinstance(value, float) else f"{value}"
        for key, value in row.items()
        if key not in ("ok", "at_s")
    )


def free_memory() -> None:
    """What closed engines and deleted models held, back to the device."""
    gc.collect()
    if "cupy" in sys.modules:
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()
    if "torch" in sys.modules and sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].cuda.empty_cache()


def true_size(checks: Checks, size: str, options: argparse.Namespace) -> None:
    """`parity` of one size, and `time` where its weights are those to be timed."""
    from deltaserve.engine.config import EngineConfig, ModelConfig
    from deltaserve.engine.model_loader import create_backend, create_model_runner
    from tools.engine_model import EngineModel, cpu_parts, cuda_parts
    from tools.hf_parity import (
        DECODE_STEPS,
        mistake_rows,
        parity_row,
        random_model,
        shared_weights,
    )
    from tools.model_shapes import hf_text_config

    device: Literal["cpu", "cuda"] = "cpu" if options.plumbing else "cuda"
    lengths = options.lengths or (SMALL_LENGTHS if options.plumbing else LENGTHS)
    hf_config = hf_text_config(size)
    config = ModelConfig.from_hf(hf_config)
    made: dict[str, Any] = {}

    def make() -> None:
        made["reference"] = random_model(hf_config, device, options.seed)
        made["weights"] = shared_weights(made["reference"], config)

    def parity() -> Iterator[dict[str, Any]]:
        make()
        longest = max(lengths)
        parts = cpu_parts(1, longest) if options.plumbing else cuda_parts(config, 1, longest)
        model = EngineModel(config, made["weights"], parts, longest + DECODE_STEPS)
        reference = made["reference"]
        exact = copy.deepcopy(reference).float() if size in EXACT_SIZES else None
        for length in lengths:
            yield parity_row(reference, exact, model, length, options.seed)
            free_memory()

    def mistakes() -> Iterator[dict[str, Any]]:
        if not made:
            make()
        parts = cpu_parts(1, 256) if options.plumbing else cuda_parts(config, 1, 256)
        model = EngineModel(config, made["weights"], parts, 256)
        yield from mistake_rows(made["reference"], model, 128, options.seed)

    def timed() -> Iterator[dict[str, Any]]:
        from tools.engine_timings import timings

        if not made:
            make()
        engine_config = EngineConfig(
            size,
            device=device,
            max_num_seqs=64,
            max_model_len=256 if options.plumbing else 16384,
            kv_cache_memory=(1 if options.plumbing else 16) << 30,
        )
        backend = create_backend(engine_config, config)
        limit = config.vocab_size
        runner = create_model_runner(config, backend, made["weights"], vocab_limit=limit)
        if options.plumbing:
            yield from timings(runner, (1, 2), ((1, 100),), context=20)
        else:
            yield from timings(runner)
        runner.close()

    if "parity" in options.only:
        checks.run(f"parity {size}", parity)
        free_memory()
    if "mistakes" in options.only:
        checks.run(f"mistakes {size}", mistakes)
        free_memory()
    if "time" in options.only and size in (TIMED_SIZE, "small"):
        checks.run(f"time {size}", timed)
    made.clear()
    free_memory()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", nargs="+", default=None, help="0.8B 2B 4B 9B 27B")
    parser.add_argument("--only", nargs="+", default=["demo", "parity", "time"])
    parser.add_argument("--lengths", nargs="+", type=int, default=None, help="of the prompts")
    parser.add_argument("--seed", type=int, default=20261130)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--plumbing", action="store_true", help="a small model on the CPU")
    options = parser.parse_args(arguments)
    os.environ["HF_HUB_OFFLINE"] = "1"
    make_importable()
    out = options.out or Path(os.environ.get("OUT", ROOT / "bench/results"))
    out = out if out.suffix == ".json" else out / "gpu_model_check.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    if not options.plumbing:
        build_if_missing(gpu_arch())
    checks = Checks(out)
    if "demo" in options.only:
        from tools.demo_parity import demo_checks

        device = "cpu" if options.plumbing else "cuda"
        checks.run("demo", lambda: demo_checks(ROOT / "models/demo", device, free_memory))
    sizes = options.sizes or (["small"] if options.plumbing else ["0.8B", "4B"])
    for size in sizes if set(options.only) - {"demo"} else ():
        try:
            true_size(checks, size, options)
        except Exception as error:
            traceback.print_exc()
            checks.failures.append(f"{size}: {type(error).__name__}: {str(error)[:300]}")
        free_memory()
    checks.print_table()
    return 1 if checks.failures else 0


if __name__ == "__main__":
    sys.exit(main())
