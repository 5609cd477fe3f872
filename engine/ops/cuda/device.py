"""The CUDA device: memory, transfers and one stream, through CuPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from ...device import StepTiming
from .step_inputs import CudaStepInputs
from .upload import PinnedStaging, write_rows

Array = Any
T = TypeVar("T")


class CudaPending(Generic[T]):
    """Launched work: its value, and the events around it."""

    def __init__(self, value: T, last_end: Any, begin: Any, end: Any) -> None:
        self._value = value
        self._last_end = last_end
        self._begin = begin
        self._end = end

    def wait(self) -> T:
        """Raises CuPy's CUDARuntimeError for an error of this or earlier work."""
        self._end.synchronize()
        return self._value

    @property
    def timing(self) -> StepTiming:
        from cupy.cuda import get_elapsed_time

        idle = get_elapsed_time(self._last_end, self._begin) if self._last_end else 0.0
        return StepTiming(get_elapsed_time(self._begin, self._end) / 1e3, idle / 1e3)


class CudaGraph:
    """A captured graph and the stream it is launched on."""

    def __init__(self, graph: Any, stream: Any) -> None:
        self._graph = graph
        self._stream = stream

    def launch(self) -> None:
        self._graph.launch(self._stream)


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
        self._last_end: Any = None

    @property
    def graphs(self) -> CudaDevice:
        return self

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
        write_rows(np.ascontiguousarray(host, array.dtype), array, start, self.stream)

    def staging(self, row_bytes: int) -> PinnedStaging:
        return PinnedStaging(self._cupy, self.stream, row_bytes)

    def host_empty(self, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
        count = math.prod(shape)
        memory = self._cupy.cuda.alloc_pinned_memory(max(count * np.dtype(dtype).itemsize, 1))
        return np.frombuffer(memory, dtype, count).reshape(shape)

    def download(self, array: Array, out: npt.NDArray[Any]) -> None:
        """Complete when the work it is part of is; at once only if `out` is of `host_empty`."""
        assert array.flags.c_contiguous and out.flags.c_contiguous
        assert array.shape == out.shape and array.dtype == out.dtype
        if array.nbytes:
            array.data.copy_to_host_async(out.ctypes.data, array.nbytes, self.stream)

    def step_inputs(self, num_bytes: int) -> CudaStepInputs:
        return CudaStepInputs(self._cupy, self.stream, num_bytes)

    def capture(self, work: Callable[[], None]) -> CudaGraph:
        self.stream.begin_capture()
        try:
            work()
        finally:
            graph = self.stream.end_capture()
        graph.upload(self.stream)
        return CudaGraph(graph, self.stream)

    def submit(self, work: Callable[[], T]) -> CudaPending[T]:
        begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        begin.record(self.stream)
        value = work()
        end.record(self.stream)
        last_end, self._last_end = self._last_end, end
        return CudaPending(value, last_end, begin, end)

    def seal(self) -> None:
        """Ends the start: what the pool holds and nobody uses goes back to the device."""
        self.stream.synchronize()
        self._cupy.get_default_memory_pool().free_all_blocks()
        self._cupy.cuda.set_allocator(_refuse)

    def mem_info(self) -> tuple[int, int]:
        free, total = self._device.mem_info
        return int(free), int(total)

    def set_profiling(self, on: bool) -> None:
        from cupy.cuda import profiler

        self.stream.synchronize()
        (profiler.start if on else profiler.stop)()

    def close(self) -> None:
        self.stream.synchronize()
        self._cupy.cuda.set_allocator(self._cupy.get_default_memory_pool().malloc)


def _refuse(size: int) -> Any:
    raise RuntimeError(f"{size} bytes of device memory asked for after the start")


def _dtype(dtype: Any) -> Any:
    """NumPy's dtype of a name, bfloat16 included."""
    if dtype == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype)
