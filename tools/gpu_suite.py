"""All checks of the GPU of this machine, one after the other, unattended and in a given time.

    python -m tools.gpu_suite --out DIR [--seconds 1500] [--only NAME ...] [--list]

Each part is a process with a time limit of its own. It leaves DIR/<name>.json and <name>.log; the
JSON of one that fails or takes too long is renamed to <name>.<outcome>.json. A part whose JSON is
there is done and not run again, nor does one start for which the time is too short: the rest is for
another call with the same DIR. Prints a line a part, the failures last; exits with 1 if any.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.gpu_check import ROOT

LOG_LINES = 25
REFUSED = b"Device not supported"
"""What compute-sanitizer prints where it cannot work, as in some virtual machines."""


@dataclass(frozen=True)
class Part:
    """`words`: what Python runs, before --out. `seconds` are expected; it may take twice that, and
    half a minute. `sanitizer`: the tool of compute-sanitizer that it runs under."""

    name: str
    words: tuple[str, ...]
    seconds: int
    sanitizer: str = ""

    @property
    def limit(self) -> float:
        return 2.0 * self.seconds + 30


def _tool(name: str, seconds: int, command: str, sanitizer: str = "") -> Part:
    return Part(name, ("-m", *f"tools.{command}".split()), seconds, sanitizer)


_SANITIZED = "gpu_check --no-pool --seed 1 --only attention_decode delta_decode delta_rule sample"

# The seconds are guesses from single runs on an H200 (bench/results), with the imports.
PARTS = (
    _tool("gpu_check", 60, "gpu_check"),
    _tool("engine_bits", 55, "gpu_engine_check --only bits"),
    _tool("demo", 12, "gpu_model_check --only demo"),
    _tool("model_0.8B", 45, "gpu_model_check --only parity mistakes --sizes 0.8B"),
    _tool("model_4B", 50, "gpu_model_check --only parity mistakes --sizes 4B"),
    _tool("model_27B", 45, "gpu_model_check --only parity --sizes 27B --lengths 1 7 64 128 4097"),
    _tool("model_2B", 35, "gpu_model_check --only parity --sizes 2B"),
    _tool("model_9B", 45, "gpu_model_check --only parity --sizes 9B"),
    _tool("verify_4B", 40, "gpu_verify --size 4B"),
    _tool("prefix_bits", 15, "bench_prefix_cache --size 4B --only bits"),
    _tool("memcheck", 25, f"{_SANITIZED} gemm_decode gemm_cluster", "memcheck"),
    _tool("racecheck", 90, f"{_SANITIZED} gemm_decode", "racecheck"),
    _tool("serving_table", 360, "serving_suite --only table engine"),
    _tool("serving_equal", 90, "serving_suite --only equal"),
    _tool("serving_loads", 40, "serving_suite --only loads"),
    _tool("serving_sizes", 90, "serving_suite --only sizes"),
    _tool("serving_soak", 330, "serving_suite --only soak"),
    _tool("bench_ops_4B", 90, "bench_ops --models 4B"),
    _tool("bench_ops_9B_27B", 180, "bench_ops --models 9B 27B"),
)


def find_sanitizer() -> str | None:
    places = (None, os.path.join(os.environ.get("CUDA_PATH", "/usr/local/cuda"), "bin"))
    return next(filter(None, (shutil.which("compute-sanitizer", path=p) for p in places)), None)


def run_part(part: Part, out: Path, limit: float) -> str:
    """Runs it; "ok", "failed" or "timed out"."""
    result = out / f"{part.name}.json"
    command = [sys.executable, *part.words, "--out", str(result)]
    if part.sanitizer:
        sanitizer = find_sanitizer()
        assert sanitizer is not None
        flags = ["--tool", part.sanitizer, "--error-exitcode", "9", "--print-limit", "20"]
        if part.sanitizer == "memcheck":  # CuPy asks for what may not be there
            flags += ["--report-api-errors", "no"]
        command = [sanitizer, *flags, *command]
    log = out / f"{part.name}.log"
    with log.open("wb") as stdout:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(limit)
            outcome = "ok" if status == 0 and result.exists() else "failed"
        except subprocess.TimeoutExpired:
            outcome = "timed out"
        finally:  # and what it started
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if outcome == "failed" and part.sanitizer and REFUSED in log.read_bytes():
        return "skipped: compute-sanitizer cannot check this device"
    if outcome != "ok" and result.exists():
        result.replace(out / f"{part.name}.{outcome.replace(' ', '_')}.json")
    return outcome


def run_parts(parts: Sequence[Part], out: Path, seconds: float) -> int:
    """Exit status: 1 if a part failed or took too long."""
    out = out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + seconds
    outcomes: dict[str, str] = {}
    for part in parts:
        began = time.monotonic()
        left = end - began
        if (out / f"{part.name}.json").exists():
            outcome = "skipped: done before"
        elif left < part.seconds:
            outcome = f"skipped: {part.seconds} s expected, {left:.0f} s left"
        elif part.sanitizer and find_sanitizer() is None:
            outcome = "skipped: no compute-sanitizer"
        else:
            outcome = run_part(part, out, min(part.limit, left))
        outcomes[part.name] = outcome
        print(f"{part.name:18s} {time.monotonic() - began:7.1f} s  {outcome}", flush=True)
        (out / "suite.txt").write_text("".join(f"{k}: {v}\n" for k, v in outcomes.items()))
    failed = [name for name, outcome in outcomes.items() if outcome in ("failed", "timed out")]
    for name in failed:
        lines = (out / f"{name}.log").read_text(errors="replace").splitlines()
        print(f"\n{name} {outcomes[name]}, the end of {out / name}.log:")
        print("\n".join(lines[-LOG_LINES:]))
    print(f"\n{', '.join(failed)} FAILED" if failed else "\nnothing failed")
    return 1 if failed else 0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build/gpu_suite")
    parser.add_argument("--seconds", type=float, default=1500.0, help="for all parts together")
    parser.add_argument("--only", nargs="+", choices=[part.name for part in PARTS], metavar="NAME")
    parser.add_argument("--list", action="store_true", help="print the parts, run nothing")
    options = parser.parse_args(arguments)
    parts = [part for part in PARTS if not options.only or part.name in options.only]
    if options.list:
        for part in parts:
            print(f"{part.name:18s} {part.seconds:4d} s  {part.sanitizer:10s} {part.words}")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the part that runs, too
    return run_parts(parts, options.out, options.seconds)


if __name__ == "__main__":
    sys.exit(main())
