"""Compiles a file of cuda/ with the host's C++ compiler and launches its kernels on NumPy arrays.

For tests of indices and formulas without a GPU; what it can and cannot show is said in
cuda_on_cpu.h.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
import pytest

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS.parent / "triton_aot"))

from cuda_sources import CUDA, dynamic_shared, kernels, sources, tensor_maps  # noqa: E402, F401

from deltaserve.engine.ops.cuda.kernels import Blocks  # noqa: E402

_ATTRIBUTES = re.compile(r"__global__ void\s+((?:__\w+__\([^)]*\)\s*)*)(\w+)\(")
_CLUSTER = re.compile(r"__cluster_dims__\((\w+), 1, 1\)")
_BOUND = re.compile(r"__launch_bounds__\(([^,)]+)")
_MOST_THREADS = "1024"
_MAP_BYTES, _MAP_ALIGN = 128, 64
_SCALARS = {
    "i32": ctypes.c_int32,
    "u32": ctypes.c_uint32,
    "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float,
}
_DTYPES = {
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp32": np.dtype(np.float32),
    "i32": np.dtype(np.int32),
    "u32": np.dtype(np.uint32),
    "u64": np.dtype(np.uint64),
}


class CpuKernels:
    """The kernels of cuda/ on NumPy arrays, as `deltaserve.engine.ops.cuda.kernels.Kernels`; those
    that sm_90 alone has among them.

    A file is compiled when one of its kernels is first launched. Triton's kernels are not here.
    `defines`: NO_BULK_COPIES for what GPUs before sm_90 run."""

    num_multiprocessors = 3
    gemm_tiles: ClassVar[dict[str, Any]] = {}

    def __init__(self, *defines: str) -> None:
        self._defines = defines
        if shutil.which("g++") is None:
            # A compiler comes with the system, not with a package, and only developers of kernels
            # need it: without one the rest of `make test` is still worth its run.
            pytest.skip("no g++ on PATH, which compiles the CUDA kernels for the CPU")
        self._sources: dict[str, tuple[Path, list[str]]] = {}
        self._maps: dict[str, list[dict[str, Any]]] = {}
        for path in (CUDA / source for source in sources("sm_90")):
            text = path.read_text()
            self._maps |= tensor_maps(text)
            for kernel, signature in kernels(text).items():
                self._sources[kernel.removesuffix("_kernel")] = (path, signature)
        self._libraries: dict[Path, ctypes.CDLL] = {}

    def constant(self, name: str, constant: str) -> int:
        raise AssertionError(f"{name} is no CUDA C++ kernel")

    def launch(self, name: str, grid: tuple[int, int, int], threads: int, *args: Any) -> None:
        """Arrays must be contiguous and of the parameter's dtype, bf16 of a map."""
        path, signature = self._sources[name]
        if path not in self._libraries:
            self._libraries[path] = compile_source(path, self._defines)
        assert len(signature) == len(args), (name, len(signature), len(args))
        values: list[Any] = []
        cuts = iter(self._maps.get(name, ()))
        for kind, argument in zip(signature, args, strict=True):
            if kind == "map":
                values.append(_tensor_map(next(cuts), argument))
            elif argument is None:
                assert kind.startswith("*"), name
                values.append(ctypes.c_void_p(None))
            elif kind.startswith("*"):
                assert argument.flags.c_contiguous, name
                assert argument.dtype == _DTYPES[kind[1:]], (name, argument.dtype, kind)
                values.append(ctypes.c_void_p(argument.ctypes.data))
            else:
                values.append(_SCALARS[kind](argument))
        pointers = (ctypes.c_void_p * len(values))(
            *(ctypes.cast(ctypes.pointer(value), ctypes.c_void_p) for value in values)
        )
        launcher = getattr(self._libraries[path], f"launch_{name}_kernel")
        launcher((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(threads, 1, 1), pointers)


def _tensor_map(cut: dict[str, Any], blocks: Blocks) -> Any:
    """As on_cpu::Map of hopper_on_cpu.h. What is refused here the driver refuses."""
    array, (rows, columns) = blocks
    assert array.flags.c_contiguous and array.dtype == _DTYPES["bf16"]
    assert array.size == rows * columns
    assert array.ctypes.data % 16 == 0 and columns * array.itemsize % 16 == 0
    memory = (ctypes.c_char * (_MAP_BYTES + _MAP_ALIGN))()
    start = -ctypes.addressof(memory) % _MAP_ALIGN
    struct.pack_into("4Q", memory, start, array.ctypes.data, rows, columns, cut["block_size"][0])
    return (ctypes.c_char * _MAP_BYTES).from_buffer(memory, start)


def compile_source(path: Path, defines: Iterable[str] = ()) -> ctypes.CDLL:
    """One .cu file as a library with a function `launch_<kernel>` for each of its kernels."""
    text, launchers = path.read_text(), ""
    found = _ATTRIBUTES.findall(text)
    assert [name for _, name in found] == list(kernels(text)), path
    for attributes, name in found:
        cluster, bound = _CLUSTER.search(attributes), _BOUND.search(attributes)
        size, threads = cluster[1] if cluster else "1", bound[1] if bound else _MOST_THREADS
        launchers += f"\nLAUNCHER({name}, ({size}), ({threads}))"
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "kernels.so"
        unit = Path(folder) / "unit.cc"
        unit.write_text(f'#include "cuda_on_cpu.h"\n#include "{path}"\n{launchers}\n')
        (Path(folder) / "cuda_bf16.h").touch()
        includes = [f"-I{place}" for place in (TESTS, folder, CUDA / "include")]
        flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", *(f"-D{name}" for name in defines)]
        command = ["g++", *flags, *includes, str(unit), "-o", str(library)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return ctypes.CDLL(str(library))
