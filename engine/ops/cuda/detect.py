"""Whether this machine has a GPU that the CUDA backend could use. Loads no CuPy."""

from __future__ import annotations

import ctypes
from importlib.util import find_spec


def has_usable_gpu() -> bool:
    """CuPy is installed, and the NVIDIA driver is there and counts at least one GPU."""
    if find_spec("cupy") is None:
        return False
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return False
    return count.value > 0
