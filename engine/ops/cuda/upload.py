"""Pinned host memory for loading weights, and the copies out of it. Owns no order: `tensor_stream`
says which buffer is filled and sent when."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

Array = Any

BUFFER_BYTES = 4 << 20
NUM_BUFFERS = 16
"""Pinning takes 0.4 s a GiB, so few; larger ones or more were slower on 4B (tools/gpu_load.py)."""
MAX_READERS = 8


class PinnedStaging:
    """`StagingBuffers` in pinned memory. Copies run on `stream`, the caller's current one.

    Rows that already have the array's type are copied straight out of the buffer, behind the
    caller. Others are converted first, into pageable memory: for the few small fp32 vectors.
    """

    def __init__(
        self,
        cupy: Any,
        stream: Any,
        row_bytes: int,
        buffer_bytes: int = BUFFER_BYTES,
        num_buffers: int = NUM_BUFFERS,
        num_readers: int | None = None,
    ) -> None:
        self.num_readers = num_readers or min(MAX_READERS, len(os.sched_getaffinity(0)))
        size = max(buffer_bytes, row_bytes)
        # Of its own, not of CuPy's pool, which would keep it: freed with the last reference.
        memory = cupy.cuda.PinnedMemoryPointer(cupy.cuda.PinnedMemory(size * num_buffers), 0)
        self.buffers: list[npt.NDArray[np.uint8]] = list(
            np.frombuffer(memory, np.uint8, size * num_buffers).reshape(num_buffers, size)
        )
        self._stream = stream
        self._events = [cupy.cuda.Event(disable_timing=True) for _ in range(num_buffers)]

    def send(self, index: int, rows: npt.NDArray[Any], array: Array, start: int) -> None:
        write_rows(rows, array, start, self._stream)
        self._events[index].record(self._stream)

    def wait(self, index: int) -> None:
        self._events[index].synchronize()

    def close(self) -> None:
        self._stream.synchronize()
        self.buffers = []


def write_rows(rows: npt.NDArray[Any], array: Array, start: int, stream: Any) -> None:
    """array[start : start + len(rows)] = rows, on the stream. From pinned memory it is copied
    behind the caller; of pageable memory the driver has its own copy when this returns."""
    host = np.ascontiguousarray(rows, array.dtype)
    target = array[start : start + len(host)]
    assert target.shape == host.shape and target.flags.c_contiguous
    target.data.copy_from_host_async(host.ctypes.data, host.nbytes, stream)
