"""Kernel launches of steps, by op, and their times summed up into tables.

`LaunchLog` hears of ops (as a `Tracer`) and of launches (in the place of the kernel library's
`launch`); a timer says how long each took. Both are in launch order.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from tools.bench_report import format_rows, number
from tools.kernel_timers import KernelTime, Timer
from tools.op_costs import Cost, Spans, op_cost, op_label

_RATES = ("MB", "GFLOP", "TB/s", "TFLOP/s", "of roof")


class Launch(NamedTuple):
    """One kernel, and the op call that it belongs to (counted within the step)."""

    op: str
    call: int
    cost: Cost | None
    kernel: str
    function: str


class _OpenOp(NamedTuple):
    label: str
    call: int
    cost: Cost | None
    num_launches: int  # of the step before it
    began: float


class LaunchLog:
    """The launches of one step at a time. An op that launches nothing (on the CPU) counts as one
    launch, timed by the host's clock."""

    def __init__(self, timer: Timer | None) -> None:
        self._timer = timer
        self._on = False
        self._spans: Spans = ()
        self._open: list[_OpenOp | None] = []
        self._num_calls = 0
        self._launches: list[Launch] = []
        self._host_times: list[KernelTime] = []

    def watch(self, library: Any) -> None:
        """From here on this stands in for `launch` of a KernelLibrary. Recorded kernels start when
        those before them have ended, so that their times do not overlap."""
        launch, entries, timer = library.launch, library._entries, self._timer
        assert timer is not None

        def noted(name: str, *args: Any) -> None:
            if not self._on:
                launch(name, *args)
                return
            op = next((op for op in reversed(self._open) if op is not None), None)
            label, call, cost = op[:3] if op is not None else ("", -1, None)
            self._launches.append(Launch(label, call, cost, name, entries[name]["function"]))
            config = library._kernel(name)._config
            early, config.num_attributes = config.num_attributes, 0
            timer.launch(lambda: launch(name, *args))
            config.num_attributes = early

        library.launch = noted

    def record(self, step: Callable[[], None], spans: Spans) -> list[tuple[Launch, float]]:
        """Runs a step, which has to wait for its work; each launch with its microseconds."""
        self._spans, self._on, self._num_calls = spans, True, 0
        self._launches, self._host_times = [], []
        if self._timer is not None:
            self._timer.start()
            self._timer.hold()
        try:
            step()
        finally:
            self._on = False
        times = self._timer.stop() if self._timer is not None else self._host_times
        if len(times) != len(self._launches):
            raise RuntimeError(f"{len(self._launches)} launches, but {len(times)} were timed")
        for launch, timed in zip(self._launches, times, strict=True):
            if timed.function and timed.function != launch.function:
                raise RuntimeError(f"launched {launch.function}, but {timed.function} was timed")
        return [(a, b.microseconds) for a, b in zip(self._launches, times, strict=True)]

    def begin(self, name: str, args: tuple[Any, ...]) -> None:
        op = None
        if self._on and args:
            cost = op_cost(name, args, self._spans)
            before = len(self._launches)
            op = _OpenOp(op_label(name, args), self._num_calls, cost, before, time.perf_counter())
            self._num_calls += 1
        self._open.append(op)

    def end(self) -> None:
        op = self._open.pop()
        if op is None or self._timer is not None:
            return
        self._host_times.append(KernelTime("", 1e6 * (time.perf_counter() - op.began)))
        self._launches.append(Launch(op.label, op.call, op.cost, op.label.split()[0], ""))


@dataclass
class OpRow:
    """All calls of one op (and weight shape) in a step. `roof_us`: what its bytes or FLOPs take at
    the peaks, None where a cost or a peak is unknown. `graph_us`: what it adds to a step of graphs,
    from the end of the kernel before it to its own."""

    op: str
    calls: int = 0
    microseconds: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0
    roof_us: float | None = None
    graph_us: float | None = None


@dataclass
class KernelRow:
    kernel: str
    op: str
    calls: int = 0
    microseconds: float = 0.0
    graph_us: float | None = None


_Row = TypeVar("_Row", OpRow, KernelRow)


@dataclass
class Cell:
    """A kind of step. `step_us`: of the device for all of it, in a graph where it has one."""

    name: str
    kernels_us: float
    launches: list[Launch] = field(default_factory=list)
    ops: list[OpRow] = field(default_factory=list)
    kernels: list[KernelRow] = field(default_factory=list)
    step_us: float | None = None


def make_cell(
    name: str, steps: Sequence[list[tuple[Launch, float]]], peaks: tuple[float, float]
) -> Cell:
    """Each launch at its median over the steps that launch what most do: now and then a step also
    brings tables up to date. `peaks`: bytes/s and FLOP/s, 0 for an unknown one."""
    alike: dict[tuple[str, ...], list[list[tuple[Launch, float]]]] = {}
    for step in steps:
        alike.setdefault(tuple(launch.kernel for launch, _ in step), []).append(step)
    steps = max(alike.values(), key=len)
    ops: dict[str, OpRow] = {}
    rows: dict[tuple[str, str], KernelRow] = {}
    costed: set[int] = set()
    for timed in zip(*steps, strict=True):
        launch = timed[0][0]
        median = statistics.median(microseconds for _, microseconds in timed)
        kernel = rows.setdefault(
            (launch.kernel, launch.op), KernelRow(launch.kernel, launch.op or "-")
        )
        kernel.calls += 1
        kernel.microseconds += median
        op = ops.setdefault(launch.op, OpRow(launch.op or "-"))
        op.microseconds += median
        if launch.call in costed and launch.call >= 0:
            continue
        costed.add(launch.call)
        op.calls += 1
        if launch.cost is not None:
            op.bytes += launch.cost.bytes
            op.flops += launch.cost.flops
    for op in ops.values():
        times = [
            1e6 * n / peak for n, peak in zip((op.bytes, op.flops), peaks, strict=True) if peak
        ]
        op.roof_us = max(times, default=0.0) or None
    total = sum(row.microseconds for row in rows.values())
    launches = [launch for launch, _ in steps[0]]
    return Cell(name, total, launches, _by_time(ops.values()), _by_time(rows.values()))


def _by_time(rows: Iterable[_Row]) -> list[_Row]:
    return sorted(rows, key=lambda row: row.microseconds, reverse=True)


def add_graph_times(cell: Cell, steps: Sequence[Sequence[KernelTime]]) -> None:
    """Sets `graph_us` from the kernels of steps with graphs, of those that ran what the cell's do,
    in that order. Kernels that start early overlap, so each counts from end to end."""
    functions = [launch.function for launch in cell.launches]
    alike = [step for step in steps if [time.function for time in step] == functions]
    if not alike:
        return
    ops: dict[str, float] = {}
    kernels: dict[tuple[str, str], float] = {}
    for index, launch in enumerate(cell.launches):
        added = statistics.median(
            step[index].end - step[index - 1].end if index else step[0].microseconds
            for step in alike
        )
        ops[launch.op or "-"] = ops.get(launch.op or "-", 0.0) + added
        key = launch.kernel, launch.op or "-"
        kernels[key] = kernels.get(key, 0.0) + added
    for op in cell.ops:
        op.graph_us = ops[op.op]
    for kernel in cell.kernels:
        kernel.graph_us = kernels[kernel.kernel, kernel.op]


def cell_tables(cell: Cell, top: int) -> str:
    step = f"; the whole step {number(cell.step_us)} us" if cell.step_us is not None else ""
    title = f"{cell.name}: kernels {number(cell.kernels_us)} us{step}"
    ops = [["op", "calls", "us", "us each", "share", "in graph", *_RATES]]
    for op in cell.ops[:top]:
        seconds = op.microseconds / 1e6
        ops.append(
            [
                op.op,
                str(op.calls),
                number(op.microseconds),
                number(op.microseconds / op.calls),
                _percent(op.microseconds, cell.kernels_us),
                number(op.graph_us) if op.graph_us is not None else "",
                number(op.bytes / 1e6) if op.bytes else "",
                number(op.flops / 1e9) if op.flops else "",
                number(op.bytes / seconds / 1e12) if op.bytes else "",
                number(op.flops / seconds / 1e12) if op.flops else "",
                _percent(op.roof_us, op.microseconds) if op.roof_us else "",
            ]
        )
    kernels = [["kernel", "calls", "us", "us each", "share", "in graph", "op"]]
    for row in cell.kernels[:top]:
        each = number(row.microseconds / row.calls)
        share = _percent(row.microseconds, cell.kernels_us)
        graph = number(row.graph_us) if row.graph_us is not None else ""
        us = number(row.microseconds)
        kernels.append([row.kernel, str(row.calls), us, each, share, graph, row.op])
    return f"{title}\n{format_rows(ops)}\n\n{format_rows(kernels)}"


def _percent(part: float, whole: float) -> str:
    return f"{100 * part / whole:.1f}%"
