"""Where CUDA's headers are on this machine. No part of `cuda_hash`: another place compiles the
same."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path

HEADER = "cuda_bf16.h"


def find_headers(major: int) -> Path:
    """A folder with CUDA's headers, of this major version where one is there. FileNotFoundError
    with the places that were looked at and what to install."""
    places = list(dict.fromkeys(_places()))
    found = [place for place in places if (place / HEADER).is_file()]
    if not found:
        package = "nvidia-cuda-runtime-cu12" if major == 12 else "nvidia-cuda-runtime"
        looked = ", ".join(map(str, places))
        raise FileNotFoundError(
            f"CUDA's headers: no {HEADER} in {looked} (pip install {package}, or CUDA_PATH)"
        )
    return next((place for place in found if _major(place) == major), found[0])


def _places() -> Iterator[Path]:
    """The wheels' folders (nvidia/cuda_runtime of CUDA 12, nvidia/cu13), then a toolkit's."""
    spec = importlib.util.find_spec("nvidia")
    for root in (spec.submodule_search_locations or ()) if spec else ():
        yield Path(root) / "cuda_runtime" / "include"
        yield from sorted(Path(root).glob("cu[0-9]*/include"))
    for toolkit in (os.environ.get("CUDA_PATH"), "/usr/local/cuda"):
        if toolkit:
            yield Path(toolkit) / "include"
            yield from sorted(Path(toolkit).glob("targets/*/include"))


def _major(place: Path) -> int | None:
    header = place / "cuda.h"
    text = header.read_text(errors="replace") if header.is_file() else ""
    version = re.search(r"#define CUDA_VERSION (\d+)", text)
    return int(version[1]) // 1000 if version else None
