"""The CUDA device: memory, transfers and one stream, through CuPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

Array = Any
T = TypeVar("T")

_STAGING_BYTES = 32 << 20


class CudaPending(Generic[T]):
    """Launched work: its value, and the event behind it."""

    def __init__(self, value: T, event: Any) -> None:
        self._value = value
        self._event = event

    def wait(self) -> T:
        """Raises CuPy's CUDARuntimeError for an error of this or earlier work."""
        self._event.synchronize()
        return self._value


class _Staging:
    """Two pinned buffers in turn: one is filled while the other's copy runs."""

    def __init__(self, cupy: Any, size: int) -> None:
        self._buffers = [
            np.frombuffer(cupy.cuda.alloc_pinned_memory(size), np.uint8, size) for _ in range(2)
        ]
        self._events = [cupy.cuda.Event(disable_timing=True) for _ in range(2)]
        self._next = 0
        self.size = size

    def copy(self, source: npt.NDArray[np.uint8], target: Array, stream: Any) -> None:
        """Bytes [n] -> device bytes [n]; returns when `source` may be changed."""
        buffer, event = self._buffers[self._next], self._events[self._next]
        self._next ^= 1
        event.synchronize()
        buffer[: len(source)] = source
        target.data.copy_from_host_async(buffer.ctypes.data, len(source), stream)
        event.record(stream)


class CudaDevice:
    """`Device` over CuPy. Everything is launched on one stream, which is the current stream of the
    thread that made the device; that thread alone may use it.

    Memory comes from CuPy's pool. `upload` copies from pageable memory, which the driver stages
    before it returns, so the caller may change its array.
    """

    name = "cuda"

    def __init__(self, index: int = 0) -> None:
        import cupy

        self._cupy = cupy
        self._device = cupy.cuda.Device(index)
        self._device.use()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.stream.use()
        self._staging: _Staging | None = None

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self._cupy.empty(shape, _dtype(dtype))

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array:
        array = self._cupy.empty(shape, _dtype(dtype))
        array.data.memset_async(0, array.nbytes, self.stream)
        return array

    def upload(self, host: npt.NDArray[Any]) -> Array:
        host = np.ascontiguousarray(host)
        array = self._cupy.empty(host.shape, host.dtype)
        if host.nbytes:
            array.data.copy_from_host_async(host.ctypes.data, host.nbytes, self.stream)
        return array

    def write_rows(self, host: npt.NDArray[Any], array: Array, start: int) -> None:
        """See `Device.write_rows`; through pinned memory, ordered on the stream."""
        if host.dtype != array.dtype:
            host = host.astype(array.dtype)
        target = array[start : start + len(host)]
        assert target.shape == host.shape and target.flags.c_contiguous
        source = np.ascontiguousarray(host).reshape(-1).view(np.uint8)
        device_bytes = target.reshape(-1).view(np.uint8)
        if self._staging is None:
            self._staging = _Staging(self._cupy, _STAGING_BYTES)
        for begin in range(0, len(source), self._staging.size):
            end = min(begin + self._staging.size, len(source))
            self._staging.copy(source[begin:end], device_bytes[begin:end], self.stream)

    def download(self, array: Array, out: npt.NDArray[Any]) -> None:
        """Complete when the work it is part of is.."""
        assert array.flags.c_contiguous and out.flags.c_contiguous
        assert array.shape == out.shape and array.dtype == out.dtype
        if array.nbytes:
            array.data.copy_to_host_async(out.ctypes.data, array.nbytes, self.stream)

    def submit(self, work: Callable[[], T]) -> CudaPending[T]:
        value = work()
        event = self._cupy.cuda.Event(disable_timing=True)
        event.record(self.stream)
        return CudaPending(value, event)

    def mem_info(self) -> tuple[int, int]:
        free, total = self._device.mem_info
        return int(free), int(total)

    def close(self) -> None:
        self.stream.synchronize()
        self._staging = None


def _dtype(dtype: Any) -> Any:
    """NumPy's dtype of a name, bfloat16 included."""
    if dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype)
