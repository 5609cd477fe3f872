"""The CPU device: NumPy memory and one worker thread that plays the part of a GPU's stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from ...device import StepTiming

STAGING_BYTES = 8 << 20
T = TypeVar("T")


class CpuPending(Generic[T]):
    """Work handed to the worker thread."""

    def __init__(self, future: Future[tuple[T, StepTiming]]) -> None:
        self._future = future

    def wait(self) -> T:
        return self._future.result()[0]

    @property
    def timing(self) -> StepTiming:
        return self._future.result()[1]


class CpuStepInputs:
    """`StepInputs` where host and device are one: arrays are passed on as they are."""

    def begin(self) -> None:
        pass

    def upload(self, host: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.ascontiguousarray(host)

    def flush(self) -> None:
        pass


class HostStaging:
    """`StagingBuffers` of a CPU device: one is read into while the rows of the other are copied,
    which is done when `send` returns."""

    num_readers = 1

    def __init__(self, device: CpuDevice, row_bytes: int) -> None:
        self.buffers = [np.empty(max(STAGING_BYTES // 2, row_bytes), np.uint8) for _ in range(2)]
        self._device = device

    def send(self, index: int, rows: npt.NDArray[Any], array: npt.NDArray[Any], start: int) -> None:
        self._device.write_rows(rows, array, start)

    def wait(self, index: int) -> None: ...

    def close(self) -> None:
        self.buffers = []


class CpuDevice:
    """`Device` over NumPy. Submitted work runs in order on one thread, behind the caller."""

    name = "cpu"
    graphs = None

    def __init__(self) -> None:
        self._last_end = 0.0
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="cpu-stream")

    def empty(self, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
        return np.empty(shape, dtype)

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
        return np.zeros(shape, dtype)

    def upload(self, host: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """The array itself where it is contiguous: the caller gives it up and may not change it."""
        return np.ascontiguousarray(host)

    def write_rows(self, host: npt.NDArray[Any], array: npt.NDArray[Any], start: int) -> None:
        rows = array[start : start + len(host)]
        if host.dtype.name == "bfloat16" and array.dtype == np.float32:
            # A bf16 value is the upper half of the same fp32 value; faster than a cast.
            np.left_shift(host.view(np.uint16), 16, out=rows.view(np.uint32), dtype=np.uint32)
        else:
            rows[...] = host

    def host_empty(self, shape: tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
        return np.empty(shape, dtype)

    def staging(self, row_bytes: int) -> HostStaging:
        return HostStaging(self, row_bytes)

    def download(self, array: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        out[...] = array

    def step_inputs(self, num_bytes: int) -> CpuStepInputs:
        return CpuStepInputs()

    def submit(self, work: Callable[[], T]) -> CpuPending[T]:
        return CpuPending(self._worker.submit(self._timed, work))

    def _timed(self, work: Callable[[], T]) -> tuple[T, StepTiming]:
        begin = time.perf_counter()
        idle = begin - self._last_end if self._last_end else 0.0
        value = work()
        self._last_end = time.perf_counter()
        return value, StepTiming(self._last_end - begin, idle)

    def seal(self) -> None:
        """No effect: the ops allocate their temporaries."""

    def mem_info(self) -> tuple[int, int]:
        """(available, total) bytes of host memory, within the limit of the control group."""
        return host_memory(Path("/proc/meminfo"), Path("/sys/fs/cgroup"))

    def set_profiling(self, on: bool) -> None:
        """No effect: profilers of the host need no marks."""

    def close(self) -> None:
        """Finishes what was submitted; later submits raise RuntimeError."""
        self._worker.shutdown(wait=True)


def host_memory(meminfo: Path, cgroup: Path) -> tuple[int, int]:
    """(available, total) bytes from /proc/meminfo, cut to the limit of a v2 or v1 cgroup."""
    fields: dict[str, int] = {}
    for line in meminfo.read_text().splitlines():
        name, _, value = line.partition(":")
        words = value.split()
        if words:
            fields[name] = int(words[0]) * (1024 if len(words) > 1 else 1)
    available, total = fields["MemAvailable"], fields["MemTotal"]
    for limit_file, usage_file in (
        (cgroup / "memory.max", cgroup / "memory.current"),
        (cgroup / "memory/memory.limit_in_bytes", cgroup / "memory/memory.usage_in_bytes"),
    ):
        try:
            limit, usage = int(limit_file.read_text()), int(usage_file.read_text())
        except (OSError, ValueError):  # no such group, or "max"
            continue
        if limit < total:
            available, total = min(available, max(limit - usage, 0)), limit
    return available, total
