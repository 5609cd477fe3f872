"""Launches compiled kernels through the driver: packs arguments, little else.

A decode pass is some 300 launches and a short prompt takes no longer on the device than its
launches do on the host, so a launch is one `struct.pack_into` and one call of cuLaunchKernelEx.
CuPy's own launcher looks at the type of every argument, and has no launch attributes.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

_FORMATS = {"i32": "i4x", "u32": "I4x", "u64": "Q", "fp32": "f4x"}
_POINTER = "Q"
_SLOT = 8  # bytes of an argument; a tensor map is larger
_MAP, _MAP_ALIGN = 128, 64
_DTYPES = {
    "*bf16": np.dtype(ml_dtypes.bfloat16),
    "*fp32": np.dtype(np.float32),
    "*i32": np.dtype(np.int32),
    "*u8": np.dtype(np.uint8),
    "*u16": np.dtype(np.uint16),
    "*u32": np.dtype(np.uint32),
    "*u64": np.dtype(np.uint64),
}
_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with an int value; the union is 64 bytes."""

    _fields_ = (
        ("id", ctypes.c_int),
        ("_pad", ctypes.c_int),
        ("value", ctypes.c_int),
        ("_rest", ctypes.c_char * 60),
    )


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("num_attributes", ctypes.c_uint),
    )


class KernelLauncher:
    """One kernel and the memory its arguments are packed into, for one thread.

    `signature`: kinds as in the manifest. `extra`: pointers appended to the arguments. A kernel
    that `may_start_early` waits for the kernels before it by itself (griddepcontrol.wait), so its
    blocks may take their place while those end. `driver`: libcuda, or what stands for it in tests.
    """

    def __init__(
        self,
        driver: Any,
        function: int,
        signature: Sequence[str],
        *,
        threads: int = 0,
        shared: int = 0,
        extra: Sequence[int] = (),
        may_start_early: bool = False,
    ) -> None:
        self.signature = tuple(signature)
        self._dtypes = [_DTYPES.get(kind) for kind in signature]
        layout, places, size = "<", [], 0
        for kind in [*signature, *("u64" for _ in extra)]:
            if kind == "map":
                padding = -size % _MAP_ALIGN
                layout += f"{padding}x{_MAP}s"
                places.append(size + padding)
                size += padding + _MAP
            else:
                layout += _POINTER if kind[0] == "*" else _FORMATS[kind]
                places.append(size)
                size += _SLOT
        self._extra = tuple(extra)
        self._pack = struct.Struct(layout).pack_into
        self._memory = (ctypes.c_char * (size + _MAP_ALIGN))()
        address = ctypes.addressof(self._memory)
        self._start = -address % _MAP_ALIGN
        places = [address + self._start + place for place in places]
        self._params = (ctypes.c_void_p * max(len(places), 1))(*places)
        self._attribute = _Attribute(id=_PROGRAMMATIC_STREAM_SERIALIZATION, value=1)
        self._config = _Config(shared=shared)
        if may_start_early:
            self._config.attributes = ctypes.addressof(self._attribute)
            self._config.num_attributes = 1
        self._call = driver.cuLaunchKernelEx
        self._arguments = (
            ctypes.byref(self._config),
            ctypes.c_void_p(function),
            self._params,
            ctypes.c_void_p(0),
        )
        self._threads = threads

    def __call__(
        self, stream: int, grid: tuple[int, int, int], threads: int, args: Sequence[Any]
    ) -> None:
        """`threads` 0: as many as the kernel was compiled for. Arrays must be C-contiguous; None is
        a null pointer, a tensor map its bytes. RuntimeError with the driver's number for a launch
        that it refuses."""
        values = []
        for dtype, argument in zip(self._dtypes, args, strict=True):
            if dtype is None:
                values.append(argument)
            elif argument is None:
                values.append(0)
            else:
                assert argument.dtype == dtype and argument._c_contiguous, (self.signature, dtype)
                values.append(argument.data.ptr)
        self._pack(self._memory, self._start, *values, *self._extra)
        config = self._config
        config.grid[:] = grid
        config.block[0], config.block[1], config.block[2] = threads or self._threads, 1, 1
        config.stream = stream
        status = self._call(*self._arguments)
        if status:
            raise RuntimeError(f"cuLaunchKernelEx: CUDA error {status}, grid {grid}")


def load_driver() -> Any:
    """libcuda, which every machine with an NVIDIA driver has."""
    return ctypes.CDLL("libcuda.so.1")
