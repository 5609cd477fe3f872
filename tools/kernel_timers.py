"""Times of single kernel launches: from CUPTI's activity records where the library is found, else
from events around each launch.

CUPTI reports what the GPU itself noted of a kernel. Events are recorded behind copies that keep the
GPU busy while the host launches, so that kernels run back to back; what lies between two of them is
counted too.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from glob import glob
from pathlib import Path
from typing import Any, NamedTuple, Protocol

_CONCURRENT_KERNEL = 10  # CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL
_BUFFER_BYTES = 8 << 20
# Of CUpti_ActivityKernel, the same in all its versions since CUDA 9:
_START, _END, _NAME = 16, 24, 104
_LONGEST_NS = 60 * 10**9


class KernelTime(NamedTuple):
    """`function` "" where the timer does not know it; `end` on the GPU's clock, 0 likewise."""

    function: str
    microseconds: float
    end: float = 0.0  # in microseconds


class Timer(Protocol):
    name: str
    sees_graphs: bool

    def start(self) -> None: ...

    def hold(self) -> None:
        """Before the launches of a step."""

    def launch(self, launch: Callable[[], None]) -> None:
        """Launches one kernel."""

    def stop(self) -> list[KernelTime]:
        """Of all kernels since `start`, in their order; waits for them."""


def make_timer(cupy: Any) -> Timer:
    """Made before the engine is: the one by events allocates."""
    library = find_cupti()
    if library is not None:
        try:
            return CuptiTimer(library, cupy)
        except (OSError, RuntimeError) as error:
            print(f"CUPTI: {error}", file=sys.stderr)
    return EventTimer(cupy)


def find_cupti() -> str | None:
    """The newest libcupti of the installed packages or of a CUDA toolkit."""
    for folder in [*sys.path, "/usr/local/cuda/extras/CUPTI/lib64", "/usr/local/cuda/lib64"]:
        patterns = ("nvidia/*/lib/libcupti.so.[0-9]*", "libcupti.so.[0-9]*")
        found = [path for pattern in patterns for path in glob(str(Path(folder) / pattern))]
        if found:
            return max(found)
    return None


class CuptiTimer:
    """Activity records of kernels."""

    name = "CUPTI"
    sees_graphs = True

    def __init__(self, library: str, cupy: Any) -> None:
        self._cupti = ctypes.CDLL(library)
        self._cupy = cupy
        self._records: list[tuple[int, KernelTime]] = []
        self._buffers: dict[int, Any] = {}
        request = ctypes.CFUNCTYPE(
            None,
            ctypes.POINTER(ctypes.c_void_p),
            ctypes.POINTER(ctypes.c_size_t),
            ctypes.POINTER(ctypes.c_size_t),
        )
        complete = ctypes.CFUNCTYPE(
            None,
            ctypes.c_void_p,
            ctypes.c_uint32,
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_size_t,
        )
        self._callbacks = request(self._give_buffer), complete(self._read_buffer)
        self._call("cuptiActivityRegisterCallbacks", *self._callbacks)

    def start(self) -> None:
        self._cupy.cuda.Device().synchronize()
        self._call("cuptiActivityFlushAll", 1)
        self._records.clear()
        self._call("cuptiActivityEnable", _CONCURRENT_KERNEL)

    def hold(self) -> None:
        pass

    def launch(self, launch: Callable[[], None]) -> None:
        launch()

    def stop(self) -> list[KernelTime]:
        self._cupy.cuda.Device().synchronize()
        self._call("cuptiActivityFlushAll", 1)
        self._call("cuptiActivityDisable", _CONCURRENT_KERNEL)
        self._records.sort(key=lambda record: record[0])
        return [time for _, time in self._records]

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._cupti, name)(*args)
        if status:
            raise RuntimeError(f"{name} failed with {status}")

    def _give_buffer(self, buffer: Any, size: Any, max_records: Any) -> None:
        memory = ctypes.create_string_buffer(_BUFFER_BYTES)
        address = ctypes.addressof(memory)
        self._buffers[address] = memory
        buffer[0], size[0], max_records[0] = address, _BUFFER_BYTES, 0

    def _read_buffer(self, _: Any, stream: int, buffer: int, size: int, valid: int) -> None:
        record = ctypes.c_void_p(None)
        following = self._cupti.cuptiActivityGetNextRecord
        while not following(ctypes.c_void_p(buffer), ctypes.c_size_t(valid), ctypes.byref(record)):
            address = record.value
            if address and ctypes.c_uint32.from_address(address).value == _CONCURRENT_KERNEL:
                start = ctypes.c_uint64.from_address(address + _START).value
                end = ctypes.c_uint64.from_address(address + _END).value
                assert start <= end < start + _LONGEST_NS, "this CUPTI has other records"
                text = ctypes.c_char_p.from_address(address + _NAME).value or b""
                self._records.append(
                    (start, KernelTime(text.decode(), (end - start) / 1e3, end / 1e3))
                )
        self._buffers.pop(buffer, None)


class EventTimer:
    """Pairs of events."""

    name = "events"
    sees_graphs = False
    _COPY_BYTES, _COPIES = 1 << 29, 60  # a quarter of a millisecond each, on an H200

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._busy = cupy.empty((2, self._COPY_BYTES), "uint8")
        self._pairs: list[tuple[Any, Any]] = []

    def start(self) -> None:
        self._pairs.clear()

    def hold(self) -> None:
        stream = self._cupy.cuda.get_current_stream()
        for _ in range(self._COPIES):
            self._busy[0].data.copy_from_device_async(self._busy[1].data, self._COPY_BYTES, stream)

    def launch(self, launch: Callable[[], None]) -> None:
        begin, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        begin.record()
        launch()
        end.record()
        self._pairs.append((begin, end))

    def stop(self) -> list[KernelTime]:
        self._cupy.cuda.Device().synchronize()
        elapsed = self._cupy.cuda.get_elapsed_time
        return [KernelTime("", 1e3 * elapsed(begin, end)) for begin, end in self._pairs]
