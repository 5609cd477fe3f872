"""Compiles the kernels of triton_aot/kernels and cuda/ to cubins and one manifest.

    python triton_aot/build.py [--arch sm_90 ...] [--candidates] [--jobs 2] [--out DIR]

Without --arch: every architecture. Needs no GPU and no torch. What is up to date, by a hash of
sources and compilers, is kept. Fails, after naming every such kernel, where one needs more shared
memory than its architecture has, or keeps registers in memory. The manifest's format is in
manifest.py.
"""

from __future__ import annotations

import argparse
import atexit
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Our own hashes decide what is compiled; Triton's cache would only keep a second copy.
if "TRITON_CACHE_DIR" not in os.environ:  # processes of ours have it
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="triton-build-")
    atexit.register(shutil.rmtree, os.environ["TRITON_CACHE_DIR"], ignore_errors=True)
os.environ.pop("TRITON_INTERPRET", None)

import compile_cuda
import compile_triton
import refresh_cuda
from architectures import MAX_SHARED
from cuda_sources import sources
from gemm_tiles import read_table
from manifest import FORMAT, cuda_hash, digest, read_manifest, replace_file, write_manifest
from variants import Variant, all_variants

HERE = Path(__file__).resolve().parent
MAX_STACK = 128
"""Bytes a thread: a few values outside of the loops may go there (Triton's compilers report the
stack and not what is spilled); what NVRTC compiles may not spill at all."""


@dataclass(frozen=True)
class Job:
    """One cubin. `subject`: a Triton variant, or the name of a .cu file."""

    arch: str
    subject: Variant | str
    hash: str

    @property
    def name(self) -> str:
        return self.subject if isinstance(self.subject, str) else self.subject.name


def run(job: Job, out: Path) -> dict[str, dict[str, Any]]:
    """Compiles one cubin, writes it, and returns its manifest entries by name."""
    if isinstance(job.subject, str):
        return refresh_cuda.compile_source(job.subject, job.arch, out)
    cubin, entry = compile_triton.compile_variant(job.subject, job.arch)
    file = f"cubins/{job.arch}/{job.name}.cubin"
    replace_file(out / file, cubin)
    return {job.name: {"file": file, **entry, "hash": job.hash}}


def plan(arch: str, candidates: bool, compilers: dict[str, str]) -> Iterator[Job]:
    """Everything to be compiled for an architecture. The hash of a cubin covers its source, what
    the source includes, the code here that compiles it, and the compilers."""
    for source in sources(arch):
        yield Job(arch, source, digest(arch, compilers["nvrtc"], cuda_hash(source)))
    tools = json.dumps(compilers, sort_keys=True)
    how = (HERE / "compile_triton.py").read_bytes()
    for variant in all_variants(arch, candidates):
        modules = (variant.module, "varlen", "early_start")
        source = b"".join((HERE / "kernels" / f"{module}.py").read_bytes() for module in modules)
        fields = asdict(variant) | {"aligned": sorted(variant.aligned)}
        yield Job(arch, variant, digest(arch, tools, how, source, json.dumps(fields)))


def complaints(arch: str, kernels: dict[str, dict[str, Any]]) -> list[str]:
    found = []
    for name, kernel in sorted(kernels.items()):
        if kernel["shared"] > MAX_SHARED[arch]:
            found.append(
                f"{arch} {name}: {kernel['shared']} bytes of shared memory, has {MAX_SHARED[arch]}"
            )
        if kernel.get("may_spill"):
            continue
        if kernel.get("spills", 0) or kernel["stack"] > MAX_STACK:
            found.append(f"{arch} {name}: {kernel['stack']} bytes of registers in memory")
    return found


def build(archs: list[str], out: Path, candidates: bool, jobs: int) -> list[str]:
    """Brings `out` up to date for `archs`; keeps other architectures. Returns what is wrong."""
    compilers = compile_triton.versions() | compile_cuda.versions()
    old = read_manifest(out)
    known = old.get("archs", {}) if old.get("compilers") == compilers else {}
    work: dict[str, list[Job]] = {}
    kept: dict[str, dict[str, Any]] = {}
    for arch in archs:
        entries = known.get(arch, {}).get("kernels", {})
        planned = list(plan(arch, candidates, compilers))
        current = {job.hash for job in planned}
        kept[arch] = {
            name: entry
            for name, entry in entries.items()
            if entry["hash"] in current and (out / entry["file"]).exists()
        }
        done = {entry["hash"] for entry in kept[arch].values()}
        work[arch] = [job for job in planned if job.hash not in done]
    total = sum(map(len, work.values()))
    print(f"{total} cubins to compile, {sum(map(len, kept.values()))} kernels up to date")
    wrong = []
    with ProcessPoolExecutor(max(1, min(jobs, total))) as pool:
        for arch in archs:
            began = time.monotonic()
            kernels = dict(kept[arch])
            futures = [(job, pool.submit(run, job, out)) for job in work[arch]]
            for job, future in futures:
                try:
                    kernels.update(future.result())
                except Exception as error:  # a kernel that does not compile: name it, go on
                    wrong.append(f"{arch} {job.name}: {type(error).__name__}: {error}")
            wrong += complaints(arch, kernels)
            put_arch(out, compilers, arch, kernels)
            print(f"{arch}: {len(kernels)} kernels, {time.monotonic() - began:.1f} s", flush=True)
    return wrong


def put_arch(
    out: Path, compilers: dict[str, str], arch: str, kernels: dict[str, dict[str, Any]]
) -> None:
    """One architecture into the manifest as it is now: other builds may run beside this one.
    Removes its cubins that no kernel lies in."""
    manifest = read_manifest(out)
    archs = manifest["archs"] if manifest.get("compilers") == compilers else {}
    archs[arch] = {"kernels": dict(sorted(kernels.items())), "gemm_tiles": read_table(arch)}
    write_manifest(out, {"format": FORMAT, "compilers": compilers, "archs": archs})
    files = {entry["file"] for entry in kernels.values()}
    for path in (out / "cubins" / arch).glob("*.cubin"):
        if path.relative_to(out).as_posix() not in files:
            path.unlink()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", action="append", choices=sorted(MAX_SHARED), help="repeatable")
    parser.add_argument("--candidates", action="store_true", help="GEMM tiles to tune among, too")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    wrong = build(options.arch or [*MAX_SHARED], options.out, options.candidates, options.jobs)
    print("\n".join(wrong), file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
