"""Times launches on the GPU: in one CUDA graph, over rotated buffers, by device events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MIN_ROTATED_BYTES = 400 << 20
"""More than any L2 holds, so that a launch finds none of its buffers there."""


def copies_for(size: int) -> int:
    """How many copies of a buffer of `size` bytes to rotate among."""
    return max(1, -(-MIN_ROTATED_BYTES // size))


def graph_microseconds(
    cupy: Any,
    launches: list[Callable[[], None]],
    min_microseconds: float = 3000.0,
    settle_microseconds: float = 0.0,
) -> float:
    """Mean time of a launch. The launches run once before they are captured, in this order; the
    graph then runs for `settle_microseconds` before it is timed, for after a pause the card's
    clocks are low."""
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        for launch in launches:
            launch()
        stream.synchronize()
        stream.begin_capture()
        for launch in launches:
            launch()
        graph = stream.end_capture()
        start, end = cupy.cuda.Event(), cupy.cuda.Event()
        replays = 1
        while True:
            graph.launch(stream)
            start.record(stream)
            for _ in range(replays):
                graph.launch(stream)
            end.record(stream)
            end.synchronize()
            elapsed = 1000.0 * float(cupy.cuda.get_elapsed_time(start, end))
            settle_microseconds -= elapsed
            if (elapsed >= min_microseconds or replays >= 4096) and settle_microseconds <= 0:
                return elapsed / replays / len(launches)
            replays = min(4 * replays, 4096)
