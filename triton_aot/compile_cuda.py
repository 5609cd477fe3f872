"""One file of cuda/ -> cubin and manifest entries, by NVRTC. Needs no GPU."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

from cupy_backends.cuda.libs import nvrtc

CUDA = Path(__file__).resolve().parent.parent / "cuda"

_ENTRY = re.compile(
    r'extern\s+"C"\s+__global__\s+(?:void\s+)?(?:__launch_bounds__\((?P<bounds>[^)]*)\)\s*)?'
    r"(?:void\s+)?(?P<name>\w+)\s*\((?P<parameters>[^)]*)\)"
)
_TYPES = {
    "bf16": "bf16",
    "float": "fp32",
    "int": "i32",
    "unsigned": "u32",
    "long long": "i64",
    "unsigned long long": "u64",
}
_USAGE = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads.*?Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


def versions() -> dict[str, str]:
    return {"nvrtc": ".".join(map(str, nvrtc.getVersion()))}


def include_dirs() -> list[str]:
    """Our headers, and CUDA's where the nvidia-cuda-runtime wheel of either version has them."""
    spec = importlib.util.find_spec("nvidia")
    found = []
    for root in spec.submodule_search_locations or () if spec else ():
        found += [header.parent for header in Path(root).glob("*/include/cuda_bf16.h")]
    if not found:
        raise FileNotFoundError("cuda_bf16.h: install nvidia-cuda-runtime-cu12 (or -cuda-runtime)")
    return [str(CUDA / "include"), str(found[0])]


def parse_signature(parameters: str) -> list[str]:
    """'const bf16* __restrict__ x, int n' -> ['*bf16', 'i32']"""
    kinds = []
    for parameter in parameters.split(","):
        words = re.sub(r"\b(const|__restrict__)\b", " ", parameter).replace("*", " * ").split()
        kind = _TYPES[" ".join(word for word in words[:-1] if word != "*")]
        kinds.append("*" + kind if "*" in words else kind)
    return kinds


def compile_file(source: str, arch: str) -> tuple[bytes, dict[str, dict[str, Any]]]:
    """The cubin of cuda/<source>, and an entry a kernel; RuntimeError with the compiler's log."""
    text = (CUDA / source).read_text()
    program = nvrtc.createProgram(text, source, (), ())
    options = [f"--gpu-architecture={arch}", "--std=c++17", "--ptxas-options=-v", "-default-device"]
    options += [f"--include-path={path}" for path in include_dirs()]
    try:
        nvrtc.compileProgram(program, tuple(options))
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{source}: {nvrtc.getProgramLog(program)}") from error
    log = nvrtc.getProgramLog(program)
    cubin = nvrtc.getCUBIN(program)
    nvrtc.destroyProgram(program)
    usage = {match["name"]: match for match in _USAGE.finditer(log)}
    entries = {}
    for entry in _ENTRY.finditer(text):
        used = usage[entry["name"]]
        shared = re.search(r"(\d+) bytes smem", used["rest"])
        entries[entry["name"].removesuffix("_kernel")] = {
            "function": entry["name"],
            "signature": parse_signature(entry["parameters"]),
            "constants": {},
            "shared": int(shared[1]) if shared else 0,
            "registers": int(used["registers"]),
            "stack": int(used["stack"]),
            "spills": int(used["stores"]) + int(used["loads"]),
        }
    assert entries.keys() == {name.removesuffix("_kernel") for name in usage}, (source, [*usage])
    return cubin, entries
