"""The bytes of tensors on their way from files to a device: reads ahead in a ring of host buffers.

    reader threads   file -> buffer i        (several reads at a time)
    the caller       waits for the reads in their order; staging.send(i, ...) launches the copies
                     out of the buffer; once those are done it goes to the next read

Owns the order and the reading. The buffers and the copies are the device's (`StagingBuffers`);
which rows go where is `weights`. Reads are plain reads: a file that shrinks meanwhile is an error,
where a mapping would be a crash.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .device import Array, StagingBuffers
from .json_section import CheckpointError


@dataclass(frozen=True)
class RowTarget:
    """`count` rows from row `first` of what was read go to rows `start` .. of `array`."""

    first: int
    count: int
    array: Array
    start: int


@dataclass(frozen=True)
class RowRead:
    """Rows of a tensor that lie together in a file, and where they go; as `sent_dtype`, to which
    the host casts them."""

    path: Path
    offset: int
    shape: tuple[int, ...]  # rows first
    dtype: np.dtype[Any]
    sent_dtype: np.dtype[Any]
    targets: tuple[RowTarget, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class TensorFile:
    """A file that several threads may read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def read(self, offset: int, out: npt.NDArray[np.uint8]) -> None:
        """Fills `out` with the bytes from `offset` on."""
        done = 0
        while done < len(out):
            try:
                count = os.preadv(self._file, [out[done:].data], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self._path}: cannot be read: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(f"{self._path}: shrank while it was read")
            done += count


def stream_rows(
    reads: Sequence[RowRead], staging: StagingBuffers, sent: Callable[[int], None]
) -> None:
    """Sends all rows in the order of `reads`; `sent(num_bytes)` after each.

    The copies may still be under way when it returns: `staging.close` waits for them. Raises
    CheckpointError for a file that cannot be read.
    """
    buffers = staging.buffers
    assert len(buffers) >= 2
    # Two buffers are left to copies that run, so that the wait below is seldom one.
    num_ahead = max(2, len(buffers) - 2)
    pending: deque[tuple[int, RowRead, Future[None]]] = deque()

    def send_oldest() -> None:
        index, read, future = pending.popleft()
        future.result()
        rows = buffers[index][: read.num_bytes].view(read.dtype).reshape(read.shape)
        rows = rows.astype(read.sent_dtype, copy=False)
        for target in read.targets:
            part = rows[target.first : target.first + target.count]
            staging.send(index, part, target.array, target.start)
        sent(read.num_bytes)

    with ExitStack() as stack:
        paths = dict.fromkeys(read.path for read in reads)
        files = {path: stack.enter_context(TensorFile(path)) for path in paths}
        readers = stack.enter_context(ThreadPoolExecutor(staging.num_readers, "weight-reader"))
        # Runs before the readers are waited for: after an error no read is begun any more.
        stack.callback(readers.shutdown, wait=False, cancel_futures=True)
        for i, read in enumerate(reads):
            index = i % len(buffers)
            staging.wait(index)
            out = buffers[index][: read.num_bytes]
            future = readers.submit(files[read.path].read, read.offset, out)
            pending.append((index, read, future))
            if len(pending) == num_ahead:
                send_oldest()
        while pending:
            send_oldest()
