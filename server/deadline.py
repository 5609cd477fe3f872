"""Deadline: what happens unless something else comes first."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadline:
    """One timer, set anew each time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float, action: Callable[[], None]) -> None:
        self.clear()
        self._timer = self._loop.call_later(seconds, action)

    def clear(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
