"""Manifest -> loaded kernels, and their launch. Owns the CuPy modules; knows no op.

The manifest (triton_aot/build.py) says for each kernel of an architecture which cubin it lies in,
the types of its arguments, its shared memory, and how much global scratch a program needs. Triton's
kernels take two pointers more than they declare: that scratch, and one for profiling.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ...data_files import find_data_dir
from .checkout import refresh_cuda_kernels
from .detect import check_gpu, find_gpus
from .kernels import Grid
from .launch import KernelLauncher, load_driver
from .tensor_maps import TensorMaps

Array = Any

MAX_SCRATCH_PROGRAMS = 1 << 14
"""Programs of one launch of a kernel with global scratch (tensor descriptors, 384 bytes each)."""
_STATIC_SHARED = 48 * 1024
"""Bytes of dynamic shared memory that a kernel may use without asking."""


def read_manifest(folder: Path | None = None) -> dict[str, Any]:
    """manifest.json of the installation; FileNotFoundError with what to do where there is none."""
    path = (folder or find_data_dir("triton_aot")) / "manifest.json"
    if not path.exists():
        raise FileNotFoundError(f"no compiled kernels: {path} is missing (make aot)")
    manifest: dict[str, Any] = json.loads(path.read_text())
    return manifest


class KernelLibrary:
    """The kernels of one architecture on the current device."""

    def __init__(self, folder: Path | None = None) -> None:
        import cupy

        self._cupy = cupy
        self._folder = folder or find_data_dir("triton_aot")
        device = cupy.cuda.Device()
        gpu = find_gpus()[device.id]
        check_gpu(gpu, read_manifest(self._folder))
        if folder is None:
            refresh_cuda_kernels(self._folder, gpu.arch)
        manifest = read_manifest(self._folder)
        self.arch = gpu.arch
        own = manifest["archs"][self.arch]
        self._entries: dict[str, dict[str, Any]] = own["kernels"]
        self.gemm_tiles: dict[str, Any] = own["gemm_tiles"]
        self.num_multiprocessors: int = device.attributes["MultiProcessorCount"]
        self._modules: dict[str, Any] = {}
        self._driver = load_driver()
        self._maps = TensorMaps(self._driver)
        self._kernels: dict[str, KernelLauncher] = {}
        self._scratch_sizes: dict[str, int] = {}
        largest = max((e.get("global_scratch", 0) for e in self._entries.values()), default=0)
        # Programs past the end of a varlen grid return before they touch their part; all others
        # are in flight on one stream, one launch after the other, so one buffer serves all.
        self._scratch_size = largest * MAX_SCRATCH_PROGRAMS
        self._scratch = cupy.empty((max(self._scratch_size, 1),), np.uint8)

    def names(self) -> tuple[str, ...]:
        return tuple(self._entries)

    def constant(self, name: str, constant: str) -> int:
        return int(self._entries[name]["constants"][constant])

    def load(self, name: str) -> None:
        """Loads a kernel now rather than at its first launch, which must not happen in a graph."""
        self._kernel(name)

    def launch(self, name: str, grid: Grid, threads: int, *args: Any) -> None:
        """See `Kernels.launch`; on the current stream."""
        kernel = self._kernels.get(name) or self._kernel(name)
        scratch = self._scratch_sizes[name]
        assert scratch * grid[0] * grid[1] * grid[2] <= self._scratch_size, (name, grid)
        values: Sequence[Any] = args
        if cuts := self._entries[name].get("tensor_maps"):
            values = self._maps.expand(cuts, args)
        kernel(self._cupy.cuda.get_current_stream().ptr, grid, threads, values)

    def _kernel(self, name: str) -> KernelLauncher:
        if name not in self._kernels:
            entry = self._entries[name]
            function = self._module(entry["file"]).get_function(entry["function"])
            is_triton = "threads" in entry
            shared = entry["shared"] if is_triton else entry.get("dynamic_shared", 0)
            if shared > _STATIC_SHARED:
                from cupy_backends.cuda.api import driver

                attribute = driver.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                driver.funcSetAttribute(function.ptr, attribute, shared)
            scratch = entry.get("global_scratch", 0)
            self._scratch_sizes[name] = scratch
            self._kernels[name] = KernelLauncher(
                self._driver,
                function.ptr,
                entry["signature"],
                threads=entry.get("threads", 0),
                shared=shared,
                extra=(self._scratch.data.ptr if scratch else 0, 0) if is_triton else (),
                may_start_early=entry.get("may_start_early", False),
            )
        return self._kernels[name]

    def _module(self, file: str) -> Any:
        if file not in self._modules:
            module = self._cupy.cuda.function.Module()
            module.load((self._folder / file).read_bytes())
            self._modules[file] = module
        return self._modules[file]
