"""One file of cuda/ -> cubin and manifest entries, by NVRTC. Needs no GPU."""

from __future__ import annotations

import re
from typing import Any

from architectures import KIB, MAX_SHARED, capability
from cuda_headers import find_headers
from cuda_sources import CUDA, dynamic_shared, kernels, tensor_maps, waiting_kernels
from cupy_backends.cuda.libs import nvrtc

_USAGE = re.compile(
    r"Function properties for (?P<name>\w+)\n[^\n]*?"
    r"(?P<stack>\d+) bytes stack frame, (?P<stores>\d+) bytes spill stores, "
    r"(?P<loads>\d+) bytes spill loads\n[^\n]*Used (?P<registers>\d+) registers(?P<rest>[^\n]*)"
)

_WITH_FEATURES = {"sm_90": "sm_90a"}
"""Architectures of which there is one member, with what only that has: products of a warpgroup."""


def versions() -> dict[str, str]:
    return {"nvrtc": ".".join(map(str, nvrtc.getVersion()))}


def compile_file(source: str, arch: str) -> tuple[bytes, dict[str, dict[str, Any]]]:
    """The cubin of cuda/<source>, and an entry a kernel; RuntimeError with the compiler's log."""
    text = (CUDA / source).read_text()
    program = nvrtc.createProgram(text, source, (), ())
    target = _WITH_FEATURES.get(arch, arch)
    options = [f"--gpu-architecture={target}", "--std=c++17", "--ptxas-options=-v"]
    for path in (CUDA / "include", find_headers(nvrtc.getVersion()[0])):
        options.append(f"--include-path={path}")
    try:
        nvrtc.compileProgram(program, tuple(options))
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{source}: {nvrtc.getProgramLog(program)}") from error
    log = nvrtc.getProgramLog(program)
    cubin = nvrtc.getCUBIN(program) + b"\0"  # CuPy drops the last byte, a zero of the headers' end
    nvrtc.destroyProgram(program)
    usage = {match["name"]: match for match in _USAGE.finditer(log)}
    waiting = waiting_kernels(text) if capability(arch) >= 90 else set()
    dynamic = dynamic_shared(text, MAX_SHARED[arch] > 99 * KIB)
    maps = tensor_maps(text)
    entries = {}
    for name, signature in kernels(text).items():
        used = usage[name]
        static = re.search(r"(\d+) bytes smem", used["rest"])
        short = name.removesuffix("_kernel")
        entries[short] = {
            "function": name,
            "signature": signature,
            "constants": {},
            **({"tensor_maps": maps[short]} if short in maps else {}),
            "may_start_early": name in waiting,
            "shared": (int(static[1]) if static else 0) + dynamic.get(short, 0),
            "dynamic_shared": dynamic.get(short, 0),
            "registers": int(used["registers"]),
            "stack": int(used["stack"]),
            "spills": int(used["stores"]) + int(used["loads"]),
        }
    return cubin, entries
