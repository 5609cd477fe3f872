"""BLAS without threads of its own.

How BLAS cuts a product for its threads changes the order of sums, and with it a result from one
machine to another; and on products of this size, with other processes on the same cores, its
threads cost many times what they save.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path

_SETTERS = (
    "scipy_openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "openblas_set_num_threads",
)


@functools.cache
def use_one_blas_thread() -> None:
    """For the whole process. Where BLAS is not an OpenBLAS found through /proc, does nothing."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return
    paths = {line.split(maxsplit=5)[-1] for line in maps.splitlines() if "openblas" in line}
    for path in sorted(paths):
        library = ctypes.CDLL(path)
        for name in _SETTERS:
            if hasattr(library, name):
                getattr(library, name)(ctypes.c_int(1))
                break
