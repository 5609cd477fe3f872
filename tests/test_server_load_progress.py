"""How loading looks: a bar that redraws itself on a terminal, a line a stage elsewhere."""

from __future__ import annotations

import io
import logging

import pytest

from deltaserve.engine.messages import Loading
from deltaserve.server.load_progress import LoadProgress, describe


@pytest.mark.parametrize(
    ("loading", "seconds", "text"),
    [
        (Loading("planning", 0, 0), 1.0, "planning"),
        (Loading("kernels", 3, 40), 1.0, "kernels 3 of 40"),
        (Loading("weights", 0, 8_000_000_000), 1.0, "weights 0.00 of 8.00 GB"),
        (
            Loading("weights", 4_000_000_000, 8_000_000_000),
            2.0,
            "weights 4.00 of 8.00 GB, 2.00 GB/s",
        ),
    ],
)
def test_a_stage_in_words(loading: Loading, seconds: float, text: str) -> None:
    assert describe(loading, seconds) == text


def test_a_terminal_gets_one_line_a_stage_redrawn_in_place() -> None:
    terminal = io.StringIO()
    progress = LoadProgress(terminal)
    for done in (0, 15, 30):
        progress(Loading("kernels", done, 30))
    progress(Loading("warming up", 0, 0))
    progress.end()
    progress.end()
    lines = terminal.getvalue().split("\n")
    assert len(lines) == 3 and lines[-1] == ""
    drawn = [part.removeprefix("\x1b[K")[:32] for part in lines[0].split("\r")[1:]]
    assert drawn == [f"[{'#' * done}{'.' * (30 - done)}]" for done in (0, 15, 30)]
    assert lines[1].endswith("] warming up")


def test_elsewhere_each_stage_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    progress = LoadProgress()  # pytest's stderr is no terminal
    for done in (0, 15, 30):
        progress(Loading("kernels", done, 30))
    progress(Loading("warming up", 0, 0))
    progress.end()
    assert caplog.messages == ["loading: kernels", "loading: warming up"]
