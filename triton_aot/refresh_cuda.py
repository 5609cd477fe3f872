"""Compiles the files of cuda/ whose cubins are missing or older than their sources.

    python triton_aot/refresh_cuda.py --arch sm_90 [--out DIR]

For one architecture that build.py has been run for. The engine runs it when it starts from a
checkout, so that an edited .cu file is what runs. Needs NVRTC only if there is something to do, and
no Triton; prints the names of the files it compiled.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from itertools import repeat
from pathlib import Path
from typing import Any

from cuda_sources import sources
from manifest import cuda_hash, digest, read_manifest, replace_file, write_manifest

HERE = Path(__file__).resolve().parent


def stale_sources(kernels: dict[str, dict[str, Any]], arch: str, out: Path) -> list[str]:
    """Names of .cu files without a kernel of their present text, or without their cubin."""
    built = {(e["file"], e.get("sources")) for e in kernels.values() if (out / e["file"]).exists()}
    return [
        source
        for source in sources(arch)
        if (cuda_file(source, arch), cuda_hash(source)) not in built
    ]


def cuda_file(source: str, arch: str) -> str:
    """Where the cubin of a .cu file lies, from the manifest's folder."""
    return f"cubins/{arch}/{Path(source).stem}.cubin"


def compile_source(source: str, arch: str, out: Path) -> dict[str, dict[str, Any]]:
    """Writes the cubin of cuda/<source>; its manifest entries by name."""
    from compile_cuda import compile_file, versions

    text_hash = cuda_hash(source)
    cubin, entries = compile_file(source, arch)
    file = cuda_file(source, arch)
    replace_file(out / file, cubin)
    own = {"hash": digest(arch, versions()["nvrtc"], text_hash), "sources": text_hash}
    return {name: {"file": file, **entry, **own} for name, entry in entries.items()}


def refresh(arch: str, out: Path) -> list[str]:
    """Brings the manifest up to date; the names of the files that were compiled."""
    stale = stale_sources(read_manifest(out)["archs"][arch]["kernels"], arch, out)
    if not stale:
        return []
    with ProcessPoolExecutor(min(len(stale), os.cpu_count() or 1)) as pool:
        compiled = list(pool.map(compile_source, stale, repeat(arch), repeat(out)))
    files = {cuda_file(source, arch) for source in stale}
    manifest = read_manifest(out)
    kernels = manifest["archs"][arch]["kernels"]
    kernels = {name: entry for name, entry in kernels.items() if entry["file"] not in files}
    for entries in compiled:
        kernels |= entries
    manifest["archs"][arch]["kernels"] = dict(sorted(kernels.items()))
    write_manifest(out, manifest)
    return stale


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", required=True)
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    try:
        for source in refresh(options.arch, options.out):
            print(source)
    except (RuntimeError, OSError) as error:  # does not compile, no headers, read-only
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
