"""Device: memory and ordered execution, the little the engine needs of a backend besides Ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

Array = Any
T = TypeVar("T")


class Pending(Protocol):
    """The result of work that was submitted to the stream."""

    def wait(self) -> Any:
        """Blocks until the work is done; returns its value or raises what it raised."""


class Device(Protocol):
    """One stream: submitted work runs in order, behind the caller."""

    name: str

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array: ...

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array: ...

    def upload(self, host: Any) -> Array:
        """Host numpy array -> device array (ordered with submitted work)."""

    def write_rows(self, host: Any, array: Array, start: int) -> None:
        """array[start : start + len(host)] = host, for loading weights. `host` has the array's
        dtype, or is bf16 for an fp32 array. The caller may change it afterwards."""

    def download(self, array: Array, out: Any) -> None:
        """Device array -> host numpy array `out` of its shape, within submitted work."""

    def submit(self, work: Callable[[], T]) -> Pending:
        """Runs `work` in stream order. The CPU device has one worker thread; CUDA calls `work` at
        once (it only launches) and records an event. `wait()` gives its value."""

    def mem_info(self) -> tuple[int, int]:
        """(free, total) bytes available to the engine."""

    def close(self) -> None: ...
