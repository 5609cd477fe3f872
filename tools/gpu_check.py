"""Checks the CUDA kernels on the GPU of this machine. (tools/bench_ops.py times them.)

    python -m tools.gpu_check [--only SECTION ...] [--seed N] [--no-pool] [--out FILE]

Sections: the ops of tools/gpu_op_checks.py (each against the NumPy op), `gemm`, `gemm_decode` and
`gemm_cluster` (against float64), and `invariance` (bits of GEMM rows over M and tiles, and of
sequences over cuts and company). Each runs by itself: one that fails does not stop the others.
Prints what failed and a table last, writes everything as JSON, and exits with 1 if anything failed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def make_importable() -> None:
    """Where the package is not installed, links the checkout's folders under its name, with the
    metadata that the server reads its version from."""
    try:
        import deltaserve.engine  # noqa: F401
    except ImportError:
        folder = Path(tempfile.mkdtemp(prefix="deltaserve-")) / "deltaserve"
        folder.mkdir()
        for name in ("engine", "server"):
            (folder / name).symlink_to(ROOT / name)
        version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
        metadata = folder.parent / f"deltaserve-{version}.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Name: deltaserve\nVersion: {version}\n")
        sys.path.insert(0, str(folder.parent))


def gpu_arch() -> str:
    import cupy

    return f"sm_{cupy.cuda.Device().compute_capability}"


def build_if_missing(arch: str) -> None:
    manifest = ROOT / "triton_aot" / "manifest.json"
    if manifest.exists() and arch in json.loads(manifest.read_text())["archs"]:
        return
    command = [sys.executable, str(ROOT / "triton_aot/build.py"), "--arch", arch]
    # complaints about registers are printed, and no reason not to run what was compiled
    subprocess.run(command, check=False)


class Report:
    """Results by section; `failures` are lines."""

    def __init__(self, sections: list[str]) -> None:
        self._only = sections
        self.results: dict[str, Any] = {}
        self.failures: list[str] = []

    def run(self, name: str, section: Callable[[], list[dict[str, Any]]]) -> None:
        """Runs a section, if it was asked for. Rows with ok = False are failures."""
        if self._only and name not in self._only and name.partition("_")[0] not in self._only:
            return
        began = time.monotonic()
        try:
            rows = section()
        except Exception as error:
            traceback.print_exc()
            self.failures.append(f"{name}: {type(error).__name__}: {str(error)[:300]}")
            return
        seconds = time.monotonic() - began
        self.results[name] = {"seconds": seconds, "rows": rows}
        bad = [row for row in rows if not row.get("ok", True)]
        self.failures += [f"{name}: {row}" for row in bad]
        print(f"{name}: {len(rows)} rows, {len(bad)} failed, {seconds:.1f} s", flush=True)


def checked(results: Any) -> list[dict[str, Any]]:
    """Rows of (what, error, tolerance); NaN fails."""
    return [
        {"what": what, "error": error, "tolerance": limit, "ok": error <= limit}
        for what, error, limit in results
    ]


def counted(results: Any) -> list[dict[str, Any]]:
    return [{"what": what, "differing_rows": n, "ok": n == 0} for what, n in results]


def print_table(results: dict[str, Any]) -> None:
    for name, section in results.items():
        rows = section["rows"]
        worst = max((r["error"] for r in rows if "error" in r), default=0.0)
        print(f"{name:20s} {len(rows):3d} checks, largest error {worst:.2e}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="*", default=[], help="sections, or first words of them")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument(
        "--no-pool", action="store_true", help="an allocation an array, as compute-sanitizer needs"
    )
    options = parser.parse_args()
    make_importable()
    import cupy

    from deltaserve.engine.ops.cuda.gemm import Gemm
    from deltaserve.engine.ops.cuda.loader import KernelLibrary
    from deltaserve.engine.ops.cuda.ops import CudaOps, OpsShape
    from tools import gpu_gemm
    from tools.gpu_arrays import Arrays
    from tools.gpu_invariance import decode_company, prompt_cuts
    from tools.gpu_op_checks import CHECKS
    from tools.gpu_sample_checks import check_sample_features

    if options.no_pool:
        cupy.cuda.set_allocator(None)
    seed = options.seed if options.seed is not None else time.time_ns() % 2**32
    arch = gpu_arch()
    build_if_missing(arch)
    kernels = KernelLibrary()
    shape = OpsShape(24, 48, max_decode_rows=256, max_prefill_tokens=8192)
    ops, gemm = CudaOps(kernels, shape, cupy.empty), Gemm(kernels)
    print(f"{arch}, {len(kernels.names())} kernels, seed {seed}", flush=True)

    report = Report(options.only)

    def run(name: str, to_rows: Callable[[Any], Any], test: Callable[..., Any], *on: Any) -> None:
        """A section that runs `test(*on)`, with arrays of the same seed as every other."""

        def section() -> list[dict[str, Any]]:
            rows: list[dict[str, Any]] = to_rows(test(*on))
            cupy.cuda.Device().synchronize()
            return rows

        report.run(name, section)

    def arrays() -> Arrays:
        return Arrays(cupy, seed)

    for name, check in {**CHECKS, "sample_features": check_sample_features}.items():
        run(name, checked, check, ops, arrays())
    run("gemm", checked, gpu_gemm.check_gemm, gemm, arrays())
    decode = gpu_gemm.CHECKED_DECODE
    run("gemm_decode", checked, gpu_gemm.check_gemm, gemm, arrays(), decode)
    run("gemm_cluster", checked, gpu_gemm.check_gemm_cluster, kernels, gemm, arrays())
    run("invariance", counted, gpu_gemm.invariance_of_table, gemm, arrays())
    run("invariance_tiles", counted, gpu_gemm.invariance_of_tiles, kernels, gemm, arrays())
    run("invariance_groups", counted, gpu_gemm.invariance_of_groups, gemm, arrays())
    run("invariance_prompt", counted, prompt_cuts, ops, arrays())
    run("invariance_decode", counted, decode_company, ops, arrays())

    out = options.out or Path(os.environ.get("OUT", ROOT / "bench/results")) / "gpu_check.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    summary = {
        "arch": arch,
        "seed": seed,
        "failures": report.failures,
        "sections": report.results,
    }
    out.write_text(json.dumps(summary, indent=1, default=_plain))
    print_table(report.results)
    print("\n".join(["FAILED", *report.failures] if report.failures else ["all checks passed"]))
    return 1 if report.failures else 0


def _plain(value: Any) -> Any:
    number = float(value)
    return number if math.isfinite(number) else str(number)


if __name__ == "__main__":
    sys.exit(main())
