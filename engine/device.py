"""Device: memory and ordered execution, the little the engine needs of a backend besides Ops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

Array = Any
T = TypeVar("T")


@dataclass(frozen=True)
class StepTiming:
    """Seconds on the device's clock: `busy` from the first to the last of submitted work, `idle`
    from the end of the work submitted before it (0 for the first)."""

    busy: float
    idle: float


class Pending(Protocol):
    """The result of work that was submitted to the stream."""

    def wait(self) -> Any:
        """Blocks until the work is done; returns its value or raises what it raised."""

    @property
    def timing(self) -> StepTiming:
        """After `wait`."""


class Graph(Protocol):
    """Work that was captured, to be launched again on the same arrays."""

    def launch(self) -> None: ...


class StepInputs(Protocol):
    """The way of a step's index arrays to the device: few and small, all in one copy.

    A step begins with `begin`, fills arrays on the host, and its work calls `flush` before it reads
    them. At most two steps may have begun and not be done.
    """

    def begin(self) -> None: ...

    def upload(self, host: Any) -> Array:
        """Host array -> an array of the device that is valid within this step."""

    def flush(self) -> None:
        """Within submitted work: what was uploaded or filled since the last flush is there."""


class FixedInputs(StepInputs, Protocol):
    """Some of the arrays stay where they are, for graphs."""

    def reserve(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An array at an address that never changes. Before the first `begin`."""

    def fill(self, reserved: Array, host: Any) -> None:
        """reserved = host, an array of its shape and type, from this step on."""


class Graphs(Protocol):
    """What only a device with graphs can do. Its kernels are loaded when they are first launched,
    which must not happen in service."""

    def step_inputs(self, num_bytes: int) -> FixedInputs:
        """As `Device.step_inputs`."""

    def capture(self, work: Callable[[], None]) -> Graph:
        """`work` as a graph, not run. Its kernels must have been launched before, and its arrays
        must stay."""


class StagingBuffers(Protocol):
    """Host memory on the way to the device, for loading weights. Any thread may fill `buffers`,
    `num_readers` of them at a time is good; the rest is for the device's own thread."""

    buffers: list[Any]  # of bytes, all of one size
    num_readers: int

    def send(self, index: int, rows: Any, array: Array, start: int) -> None:
        """array[start : start + len(rows)] = rows, which lie in buffer `index`, or were cast from
        it. The copy may run behind the caller. Types are those of `Device.write_rows`."""

    def wait(self, index: int) -> None:
        """Until all that was sent from the buffer has arrived, so that it may be filled again."""

    def close(self) -> None:
        """Waits for all copies and frees the buffers."""


class Device(Protocol):
    """One stream: submitted work runs in order, behind the caller."""

    name: str

    @property
    def graphs(self) -> Graphs | None: ...

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array: ...

    def zeros(self, shape: tuple[int, ...], dtype: Any) -> Array: ...

    def upload(self, host: Any) -> Array:
        """Host numpy array -> device array (ordered with submitted work)."""

    def write_rows(self, host: Any, array: Array, start: int) -> None:
        """array[start : start + len(host)] = host, which has the array's dtype, or is bf16 for an
        fp32 array. The caller may change it afterwards."""

    def staging(self, row_bytes: int) -> StagingBuffers:
        """At least two buffers of at least `row_bytes` each."""

    def host_empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        """A numpy array that `download` fills without waiting (pinned, on CUDA)."""

    def download(self, array: Array, out: Any) -> None:
        """Device array -> host numpy array `out` of its shape, within submitted work."""

    def step_inputs(self, num_bytes: int) -> StepInputs:
        """For steps whose arrays take `num_bytes` together."""

    def submit(self, work: Callable[[], T]) -> Pending:
        """Runs `work` in stream order. The CPU device has one worker thread; CUDA calls `work` at
        once (it only launches) and records an event. `wait()` gives its value."""

    def seal(self) -> None:
        """From here on allocating device memory raises RuntimeError: all is planned at start."""

    def mem_info(self) -> tuple[int, int]:
        """(free, total) bytes available to the engine."""

    def set_profiling(self, on: bool) -> None:
        """cudaProfilerStart or Stop, when all submitted work is done; no effect on the CPU."""

    def close(self) -> None: ...
