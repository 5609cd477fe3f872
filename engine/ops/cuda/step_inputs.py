"""The index arrays of a step: two pinned host buffers in turn, one device buffer, one copy a step.

    host  0  | reserved | uploaded ......|          step n
    host  1  | reserved | uploaded ...|             step n+1, filled while step n runs
    device   | reserved | uploaded ......|          overwritten in stream order

Offsets restart in every step. Reserved arrays lie in front, where CUDA graphs find them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Array = Any

ALIGN = 256


class CudaStepInputs:
    """`StepInputs` on one stream. AssertionError where a step needs more than it was made for."""

    def __init__(self, cupy: Any, stream: Any, num_bytes: int) -> None:
        self._cupy = cupy
        self._stream = stream
        self._size = num_bytes
        self._hosts = tuple(
            np.frombuffer(cupy.cuda.alloc_pinned_memory(num_bytes), np.uint8, num_bytes)
            for _ in range(2)
        )
        self._device = cupy.empty((num_bytes,), np.uint8)
        self._half = 0
        self._reserved: dict[int, tuple[int, int]] = {}  # id of an array -> its byte range
        self._first = 0  # where uploads start
        self._next = 0
        self._flushed = 0

    def reserve(self, shape: tuple[int, ...], dtype: Any) -> Array:
        dtype = np.dtype(dtype)
        begin, self._first = self._range(self._first, math.prod(shape) * dtype.itemsize)
        array = self._view(begin, shape, dtype)
        self._reserved[id(array)] = (begin, begin + array.nbytes)
        return array

    def begin(self) -> None:
        self._half ^= 1
        self._next = self._first
        self._flushed = 0

    def upload(self, host: npt.NDArray[Any]) -> Array:
        begin, self._next = self._range(self._next, host.nbytes)
        self._hosts[self._half][begin : begin + host.nbytes] = _bytes(host)
        return self._view(begin, host.shape, host.dtype)

    def fill(self, reserved: Array, host: npt.NDArray[Any]) -> None:
        assert reserved.shape == host.shape and reserved.dtype == host.dtype
        begin, end = self._reserved[id(reserved)]
        assert self._flushed == 0, "filled after the step's first flush"
        self._hosts[self._half][begin:end] = _bytes(host)

    def flush(self) -> None:
        begin, end = self._flushed, self._next
        self._flushed = end
        if end > begin:
            host = self._hosts[self._half]
            source = host.ctypes.data + begin
            (self._device.data + begin).copy_from_host_async(source, end - begin, self._stream)

    def _range(self, begin: int, num_bytes: int) -> tuple[int, int]:
        end = -(-(begin + num_bytes) // ALIGN) * ALIGN
        assert end <= self._size, (end, self._size)
        return begin, end

    def _view(self, begin: int, shape: tuple[int, ...], dtype: Any) -> Array:
        return self._cupy.ndarray(shape, dtype, self._device.data + begin)


def _bytes(host: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(host).reshape(-1).view(np.uint8)
