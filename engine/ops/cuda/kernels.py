"""What the ops of this package need of a machine that runs kernels.

`loader.KernelLibrary` is one on a GPU; the tests have another that runs cuda/*.cu on the CPU.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

Grid = tuple[int, int, int]


class Blocks(NamedTuple):
    """A launch argument: a C-contiguous array, seen as `shape`, that the kernel reads or writes in
    blocks by a tensor map."""

    array: Any
    shape: tuple[int, ...]


class Kernels(Protocol):
    num_multiprocessors: int
    gemm_tiles: dict[str, Any]
    """The architecture's table of GEMM tiles, as triton_aot/gemm_tiles.py describes it."""

    def launch(self, name: str, grid: Grid, threads: int, *args: Any) -> None:
        """Launches the kernel `name` of the manifest. `args` in the order of its signature: arrays
        (None: a null pointer), `Blocks`, ints and floats. `threads` 0: as many as it was compiled
        for."""

    def constant(self, name: str, constant: str) -> int:
        """The value that a kernel was compiled with."""
