"""Two threads for the rows of a decode step, or for the tiles of a prompt.

NumPy's inner loops run without the interpreter's lock, so two halves of the rows run side by side
where their calls are long enough. A row's bits do not depend on who computes it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

MIN_ROWS = 8
"""With fewer, waking the second thread costs more than it brings."""

_second_thread = ThreadPoolExecutor(1, "rows")  # its thread starts with the first work


def for_rows(num_rows: int, work: Callable[[int, int], None]) -> None:
    """Calls work(start, end) so that all rows are covered once, in two threads if that pays."""
    if num_rows < MIN_ROWS or os.cpu_count() == 1:
        work(0, num_rows)
        return
    half = num_rows // 2
    rest = _second_thread.submit(work, half, num_rows)
    work(0, half)
    rest.result()
