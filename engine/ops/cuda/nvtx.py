"""NVTX ranges, which nsys and ncu show beside the kernels launched in them."""

from __future__ import annotations

from typing import Any


class NvtxTracer:
    """A `Tracer`; of the thread that calls it."""

    def __init__(self) -> None:
        from cupy.cuda import nvtx

        self._push = nvtx.RangePush
        self._pop = nvtx.RangePop

    def begin(self, name: str, args: tuple[Any, ...]) -> None:
        self._push(name)

    def end(self) -> None:
        self._pop()
