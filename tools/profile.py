"""Where a step's time goes, kernel by kernel and op by op, beside what the hardware allows.

    python -m tools.profile --size 4B --decode 1 64 --context 1100 --prefill 1024
    python -m tools.profile --model-path models/demo --device cpu --decode 4
    python -m tools.profile --size 4B --decode 1 --nsys step       (or --ncu step, where installed)

The engine runs as it serves, but launches its kernels one by one, so that each is known by op: they
are the kernels of the graphs. Random weights of a true size, or those of --model-path. Each kind
of step has two tables. Ops: with the bytes and FLOPs that they ask for and, "of roof", what
share of the measured time those take at the card's peaks. Kernels: with their ops. "The whole step"
is how long it takes the device in CUDA graphs, where a kernel may start while the one before it
ends; "in graph" is what an op adds to it, from the end of the kernel before it to its own. On the
CPU an op counts as one kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tools.gpu_check import make_importable
from tools.model_shapes import SIZES

NSYS = ("--trace=cuda,nvtx", "--cuda-graph-trace=node", "--capture-range=cudaProfilerApi")
NCU = ("--profile-from-start", "off", "--nvtx", "--set", "full")


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    if not args.decode and not args.prefill:
        args.decode, args.prefill = [1], [1024]
    if args.nsys or args.ncu:
        return _under_profiler(args, arguments if arguments is not None else sys.argv[1:])
    make_importable()
    from deltaserve.engine.config import ConfigError
    from deltaserve.engine.json_section import CheckpointError
    from deltaserve.engine.request_queue import RequestTooLargeError

    try:
        return _profile(args)
    except (ConfigError, CheckpointError, RequestTooLargeError, OSError) as error:
        print(f"profile: {error}", file=sys.stderr)
        return 2


def _profile(args: argparse.Namespace) -> int:
    from tools.launch_log import cell_tables
    from tools.profile_steps import Kind, Profile

    if args.model_path is not None and not Path(args.model_path).is_dir():
        raise FileNotFoundError(f"--model-path {args.model_path}: there is no such directory")
    kinds = [Kind(rows, args.context, True) for rows in args.decode]
    kinds += [Kind(1, tokens, False) for tokens in args.prefill]
    profile = Profile(
        args.model_path or args.size,
        device=args.device,
        max_rows=max([1, *args.decode]),
        max_len=max(kind.length for kind in kinds) + 512,
        peaks=(args.peak_bandwidth, args.peak_flops),
    )
    if args.profiled:
        profile.run_profiled(kinds)
        return 0
    cells = profile.measure(kinds)
    result = {"format": 1, **profile.facts(), "cells": [_plain(cell) for cell in cells]}
    if args.json:
        Path(args.json).write_text(json.dumps(result, indent=1))
    print(", ".join(f"{key} {value}" for key, value in profile.facts().items()))
    for cell in cells:
        print(f"\n{cell_tables(cell, args.top)}")
    return 0


def _positive(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be 1 or more, got {text!r}")
    return int(text)


def _plain(cell: Any) -> dict[str, Any]:
    """For JSON, without the list of single launches."""
    return {key: value for key, value in asdict(cell).items() if key != "launches"}


def _under_profiler(args: argparse.Namespace, arguments: list[str]) -> int:
    """This program again, under nsys or ncu, recording the steps alone."""
    program, options, out = ("nsys", NSYS, args.nsys) if args.nsys else ("ncu", NCU, args.ncu)
    path = shutil.which(program)
    if path is None:
        print(f"profile: {program} is not installed", file=sys.stderr)
        return 2
    kept = list(arguments)
    for flag in ("--nsys", "--ncu"):
        kept = [word for word in kept if not word.startswith(f"{flag}=")]
        if flag in kept:
            del kept[kept.index(flag) : kept.index(flag) + 2]
    command = [path, *(("profile",) if program == "nsys" else ()), *options, "-o", out, "-f"]
    command += [*(("true",) if program == "nsys" else ()), sys.executable, "-m", "tools.profile"]
    return subprocess.run([*command, *kept, "--profiled"], env=os.environ, check=False).returncode


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--size", default="4B", choices=SIZES, help="of random weights")
    add("--model-path", help="a checkpoint instead")
    add("--device", default="auto", choices=("auto", "cuda", "cpu"))
    add(
        "--decode",
        type=_positive,
        nargs="*",
        default=[],
        metavar="ROWS",
        help="steps of so many rows (default: 1, and a prompt of 1024)",
    )
    add("--context", type=_positive, default=1024, help="tokens before each of those rows")
    add(
        "--prefill",
        type=_positive,
        nargs="*",
        default=[],
        metavar="TOKENS",
        help="a prompt in one step",
    )
    add("--peak-bandwidth", type=float, metavar="TB/S", help="default: known by the card's name")
    add("--peak-flops", type=float, metavar="TFLOP/S", help="dense bf16; the same")
    add("--top", type=int, default=30, help="lines of a table")
    add("--json", metavar="FILE")
    add("--nsys", metavar="OUT", help="record the steps with Nsight Systems")
    add("--ncu", metavar="OUT", help="record their kernels with Nsight Compute")
    add("--profiled", action="store_true", help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
