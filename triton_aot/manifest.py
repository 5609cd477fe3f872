"""manifest.json and what says whether a cubin in it is up to date. Needs no compiler.

compilers   name -> version
archs       arch -> kernels      name -> file, function, signature (in launch order, without
                                 constants), constants, threads, shared (bytes in all), registers,
                                 stack, global_scratch (bytes a program), hash; tensor_maps (how
                                 the arrays of "map" arguments are cut into blocks); of what NVRTC
                                 compiled, dynamic_shared (bytes of `shared` to ask for at launch;
                                 Triton's is all of it) and sources: see `cuda_hash`
                 -> gemm_tiles   see gemm_tiles.py
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from cuda_sources import CUDA

FORMAT = 1
_HERE = Path(__file__).resolve().parent


def digest(*parts: str | bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()[:32]


def cuda_hash(source: str) -> str:
    """Of a file of cuda/, all headers there, and the code here that compiles it."""
    how = (_HERE / "compile_cuda.py").read_bytes() + (_HERE / "cuda_sources.py").read_bytes()
    headers = b"".join(p.read_bytes() for p in sorted((CUDA / "include").glob("*")))
    return digest(how, headers, (CUDA / source).read_bytes())


def read_manifest(folder: Path) -> dict[str, Any]:
    """Empty where there is none, or one of another format."""
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    except FileNotFoundError:
        return {}
    return manifest if manifest.get("format") == FORMAT else {}


def write_manifest(folder: Path, manifest: dict[str, Any]) -> None:
    replace_file(folder / "manifest.json", json.dumps(manifest, indent=1).encode())


def replace_file(path: Path, data: bytes) -> None:
    """Whoever reads it meanwhile, or writes it too, sees one content or the other."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_bytes(data)
    new.replace(path)
