"""One Triton variant -> cubin and manifest entry. Needs neither a GPU nor torch."""

from __future__ import annotations

import importlib
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from architectures import capability
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from variants import Variant

WARP_SIZE = 32
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def versions() -> dict[str, str]:
    """Of Triton and of the two assemblers it carries (the second is for Blackwell)."""
    found = {"triton": triton.__version__}
    for tool in ("ptxas", "ptxas-blackwell"):
        text = subprocess.run([TOOLS / tool, "--version"], capture_output=True, text=True).stdout
        match = re.search(r"V(\d+\.\d+\.\d+)", text)
        assert match is not None, text
        found[tool] = match[1]
    return found


def compile_variant(variant: Variant, arch: str) -> tuple[bytes, dict[str, Any]]:
    """The cubin, and what a launch needs to know about it."""
    function = getattr(importlib.import_module(f"kernels.{variant.module}"), variant.function)
    unknown = set(function.arg_names) ^ (variant.arguments.keys() | variant.constants.keys())
    assert not unknown, f"{variant.name}: arguments {sorted(unknown)}"
    signature = {name: variant.arguments.get(name, "constexpr") for name in function.arg_names}
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(function.arg_names)
        if name in variant.aligned
    }
    kernel = triton.compile(
        ASTSource(function, signature, variant.constants, attributes),
        target=GPUTarget("cuda", capability(arch), WARP_SIZE),
        options={
            "num_warps": variant.num_warps,
            "num_stages": variant.num_stages,
            "maxnreg": variant.max_registers,
        },
    )
    cubin = kernel.asm["cubin"]
    metadata = kernel.metadata
    return cubin, {
        "function": metadata.name,
        "signature": [part for kind in signature.values() for part in launched(kind)],
        "tensor_maps": [dict(meta) for meta in metadata.tensordesc_meta or ()],
        "constants": variant.constants,
        "threads": metadata.num_warps * WARP_SIZE,
        "shared": metadata.shared,
        "global_scratch": metadata.global_scratch_size,
        "global_scratch_align": metadata.global_scratch_align,
        "may_start_early": "griddepcontrol.wait" in kernel.asm["ptx"],
        "profile_scratch": metadata.profile_scratch_size,
        "may_spill": variant.may_spill,
        **resource_usage(cubin),
    }


def launched(kind: str) -> list[str]:
    """What a launch passes for an argument: nothing for constants; for a tensor map itself, the
    sizes and the strides of what it maps."""
    if kind == "constexpr":
        return []
    if not kind.startswith("tensordesc"):
        return [kind]
    rank = kind.count(",") + 1
    return ["map", *["i32"] * rank, *["u64"] * rank]


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes a thread of a cubin with one kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    match = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert match is not None, text
    return {"registers": int(match[1]), "stack": int(match[2])}
