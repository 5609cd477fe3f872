"""LoadProgress: how far the loading is, on a terminal as a bar, elsewhere as a line a stage."""

from __future__ import annotations

import logging
import sys
import time
from typing import TextIO

from deltaserve.engine.messages import Loading

logger = logging.getLogger("deltaserve")

_BAR = 30
_LINE_EVERY_S = 10.0


class LoadProgress:
    """Called with every message of the loading; `end` it before anything else is printed."""

    def __init__(self, terminal: TextIO | None = None) -> None:
        """`terminal`: where a bar can be drawn; by default stderr, if it is one."""
        if terminal is None and sys.stderr.isatty():
            terminal = sys.stderr
        self._terminal = terminal
        self._stage = ""
        self._began = self._last_line = 0.0
        self._drawn = False

    def __call__(self, loading: Loading) -> None:
        now = time.monotonic()
        if loading.stage != self._stage:
            self.end()
            self._stage, self._began, self._last_line = loading.stage, now, now
            if self._terminal is None:
                logger.info("loading: %s", loading.stage)
        if self._terminal is not None:
            bar = f"\r\x1b[K{_bar(loading)} {describe(loading, now - self._began)}"
            self._terminal.write(bar)
            self._terminal.flush()
            self._drawn = True
        elif now - self._last_line >= _LINE_EVERY_S:
            self._last_line = now
            logger.info("loading: %s", describe(loading, now - self._began))

    def end(self) -> None:
        if self._terminal is not None and self._drawn:
            self._terminal.write("\n")
            self._terminal.flush()
        self._drawn = False


def describe(loading: Loading, seconds: float) -> str:
    """'reading weights 3.2 of 8.4 GB, 2.10 GB/s'; counts of other things stay numbers."""
    stage, done, total = loading.stage, loading.done, loading.total
    if not total:
        return stage
    if total < 1_000_000:
        return f"{stage} {done} of {total}"
    rate = f", {done / seconds / 1e9:.2f} GB/s" if done and seconds > 0 else ""
    return f"{stage} {done / 1e9:.2f} of {total / 1e9:.2f} GB{rate}"


def _bar(loading: Loading) -> str:
    filled = _BAR * loading.done // loading.total if loading.total else 0
    return f"[{'#' * filled}{'.' * (_BAR - filled)}]"
