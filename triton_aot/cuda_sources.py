"""What the files of cuda/ hold, read from their text: kernels and their parameters."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

CUDA = Path(__file__).resolve().parent.parent / "cuda"

_ENTRY = re.compile(
    r'extern\s+"C"\s+__global__\s+void\s+(?:__\w+__\([^)]*\)\s*)*'
    r"(?P<name>\w+)\s*\((?P<parameters>[^)]*)\)"
)
_TYPES = {
    "bf16": "bf16",
    "float": "fp32",
    "int": "i32",
    "unsigned": "u32",
    "unsigned long long": "u64",
    "u32": "u32",
    "u64": "u64",
    "TensorMap": "map",
}
_MAP_COLUMNS, _SWIZZLE_128B, _BF16_BYTES = 64, 3, 2
"""Of the blocks that include/hopper.cuh's maps make: bf16 columns, CUtensorMapSwizzle."""


def sources(arch: str) -> list[str]:
    """The files of an architecture, from CUDA: those of all, and those in a folder of its own."""
    found = [*CUDA.glob("*.cu"), *(CUDA / arch).glob("*.cu")]
    return sorted(path.relative_to(CUDA).as_posix() for path in found)


def parse_signature(parameters: str) -> list[str]:
    """'const bf16* __restrict__ x, int n' -> ['*bf16', 'i32']"""
    kinds = []
    for parameter in parameters.split(","):
        plain = re.sub(r"\b(const|__restrict__|__grid_constant__)\b", " ", parameter)
        words = plain.replace("*", " * ").split()
        kind = _TYPES[" ".join(word for word in words[:-1] if word != "*")]
        kinds.append("*" + kind if "*" in words else kind)
    return kinds


def waiting_kernels(text: str) -> set[str]:
    """The kernels of a file that wait for those before them by themselves (see common.cuh): where
    the wait is in what comes before the first kernel, that is shared by all, all of them."""
    starts = [(match.start(), match["name"]) for match in _ENTRY.finditer(text)]
    ends = [start for start, _ in starts[1:]] + [len(text)]
    shared = text[: starts[0][0]]
    return {
        name
        for (start, name), end in zip(starts, ends, strict=True)
        if "wait_for_earlier_kernels();" in shared + text[start:end]
    }


def dynamic_shared(text: str, large: bool) -> dict[str, int]:
    """Bytes of dynamic shared memory of the kernels of a file that have some (see common.cuh)."""
    found = re.findall(r"^DYNAMIC_SHARED_BYTES\((\w+), (\d+), (\d+)\);", text, re.MULTILINE)
    return {name: int(sizes[large]) for name, *sizes in found}


def tensor_maps(text: str) -> dict[str, list[dict[str, Any]]]:
    """How the maps of the kernels of a file that have some cut their arrays (see hopper.cuh)."""
    found = re.findall(r"^TENSOR_MAP_ROWS\((\w+), (\d+), (\d+)\);", text, re.MULTILINE)
    return {name: [_map_cut(int(rows)) for rows in counts] for name, *counts in found}


def _map_cut(rows: int) -> dict[str, Any]:
    """As Triton says it; `bare`: the kernel takes the map alone, without sizes and strides."""
    block = [rows, _MAP_COLUMNS]
    return {"swizzle": _SWIZZLE_128B, "elem_size": _BF16_BYTES, "block_size": block, "bare": True}


def kernels(text: str) -> dict[str, list[str]]:
    """The kernels of a file: name -> signature."""
    return {match["name"]: parse_signature(match["parameters"]) for match in _ENTRY.finditer(text)}
