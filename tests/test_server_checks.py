"""tools/server_checks.py against a server whose engine is scripted: what holds and what fails."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tools import server_checks

from .scripted_engine import ROW_ERROR
from .server_process import ServerProcess, start_scripted


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("checks")
    started = start_scripted(directory, max_queue=6, step_s=0.001).wait_ready()
    yield started
    started.stop()


def check(
    server: ServerProcess, tmp_path: Path, only: str, low: int, *flags: str
) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "checks.json"
    common = ["--url", server.url, "--json", str(out), "--only", only]
    ids = ["--token-ids", str(low), str(low + 50 if low > ROW_ERROR else low + 1)]
    code = server_checks.main([*common, *ids, "--pid", str(server.process.pid), *flags])
    return code, json.loads(out.read_text())[only]


def test_waves_are_completed_or_refused(server: ServerProcess, tmp_path: Path) -> None:
    code, result = check(server, tmp_path, "overload", 50, "--scale", "0.03")
    assert (code, result["failures"]) == (0, [])
    assert [wave["requests"] for wave in result["waves"]] == [15, 2, 30]
    assert result["waves"][0]["refused"] > 0 and result["waves"][1]["refused"] == 0
    assert result["memory_before"]["host"] > 10  # MiB, of a server and its engine


def test_a_soak_completes_some_and_gives_up_others(server: ServerProcess, tmp_path: Path) -> None:
    flags = ["--seconds", "1", "--streams", "6"]
    code, result = check(server, tmp_path, "soak", 50, *flags)
    assert (code, result["failures"]) == (0, [])
    assert result["completed"] > 0 and result["aborted"] > 0


def test_failed_requests_fail_the_check(server: ServerProcess, tmp_path: Path) -> None:
    code, result = check(server, tmp_path, "overload", ROW_ERROR, "--scale", "0.01")
    assert code == 1 and any("not finite" in failure for failure in result["failures"])


def test_gaps_beyond_the_limit_fail_the_check(server: ServerProcess, tmp_path: Path) -> None:
    flags = ["--mixed-tokens", "100", "--settle", "0", "--max-gap", "0.0001"]
    code, result = check(server, tmp_path, "mixed", 50, *flags)
    assert code == 1 and any("of the gaps" in failure for failure in result["failures"])


@pytest.mark.parametrize("flags", [["--seconds", "0"], ["--streams", "0"], ["--seconds", "nan"]])
def test_a_soak_of_nothing_fails(server: ServerProcess, tmp_path: Path, flags: list[str]) -> None:
    code, result = check(server, tmp_path, "soak", 50, "--seconds", "0.1", *flags)
    assert code == 1 and "no request was completed" in result["failures"][0]


def test_long_prompts_that_do_not_fit_fail_the_check(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_checks, "LONG_PROMPTS", (1 << 30,))
    flags = ["--mixed-tokens", "100", "--settle", "0"]
    code, result = check(server, tmp_path, "mixed", 50, *flags)
    assert code == 1 and "no long prompt fits" in result["failures"][0]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pid", str(1 << 30)], "there is no such process"),
        (["--url", "http://127.0.0.1:1"], "refused"),
        (["--url", "nowhere"], "unknown url"),
        (["--token-ids", "9", "3"], "holds none"),
    ],
)
def test_what_cannot_be_checked_is_said_in_a_line(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    common = ["--url", server.url, "--token-ids", "50", "100", "--only", "soak", "--seconds", "0.1"]
    assert server_checks.main([*common, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("server_checks: ") and message in line
