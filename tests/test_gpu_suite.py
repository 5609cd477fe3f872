"""tools/gpu_suite.py with parts that need no GPU."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tools.gpu_suite import PARTS, Part, run_parts

WRITE = "import sys, pathlib; pathlib.Path(sys.argv[2]).write_text('{}')"
FAIL = f"{WRITE}; print('a row differs'); sys.exit(1)"
HANG = f"{WRITE}; import time; time.sleep(100)"


class Quick(Part):
    limit = 1.0


def part(name: str, code: str, seconds: int = 0) -> Part:
    return (Quick if code == HANG else Part)(name, ("-c", code), seconds)


def outcomes(printed: str) -> dict[str, str]:
    """name -> outcome, of the lines before the failures."""
    lines = printed.split("\n\n")[0].splitlines()
    return {line.split()[0]: line.split(" s  ", 1)[1] for line in lines}


def test_parts_run_one_by_one_and_failures_are_last(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [
        part("fails", FAIL),
        part("hangs", HANG),
        part("silent", "pass"),
        part("good", WRITE),
        part("long", WRITE, 1000),
    ]
    assert run_parts(parts, tmp_path, 60) == 1
    printed = capsys.readouterr().out
    found = outcomes(printed)
    assert found.pop("long").startswith("skipped: 1000 s expected, ")
    assert found == {"fails": "failed", "hangs": "timed out", "silent": "failed", "good": "ok"}
    assert "\na row differs\n" in printed.split("\n\n", 1)[1]
    assert printed.endswith("\nfails, hangs, silent FAILED\n")
    left = {path.name for path in tmp_path.glob("*.json")}
    assert left == {"good.json", "fails.failed.json", "hangs.timed_out.json"}


def test_what_is_done_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_parts([part("a", WRITE), part("b", FAIL)], tmp_path, 60) == 1
    capsys.readouterr()
    assert run_parts([part("a", FAIL), part("b", WRITE)], tmp_path, 60) == 0
    assert outcomes(capsys.readouterr().out) == {"a": "skipped: done before", "b": "ok"}


def test_a_part_that_takes_too_long_ends_with_all_it_started(tmp_path: Path) -> None:
    """A pipe that only the child of the part writes to ends when the child does."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    code = f"import time; f = open({str(tmp_path / 'pipe')!r}, 'w'); print('here', file=f)"
    child = f"{code}; f.flush(); time.sleep(100)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    assert run_parts([Quick("parent", ("-c", parent), 0)], tmp_path, 60) == 1
    os.set_blocking(reader, True)
    with open(reader) as pipe:
        assert pipe.read() == "here\n"


def test_sanitizer_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A stand-in that shows its arguments and runs the rest, as the real one does."""
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    monkeypatch.setenv("PATH", os.devnull)
    checked = Part("checked", ("-c", WRITE), 0, "racecheck")
    assert run_parts([checked], tmp_path / "out", 60) == 0
    assert outcomes(capsys.readouterr().out) == {"checked": "skipped: no compute-sanitizer"}
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin/compute-sanitizer"
    program.touch(0o755)

    def stand_in(tool: str, command: int) -> None:
        program.write_text(
            f"#!{sys.executable}\nimport os, sys\nassert sys.argv[1:3] == ['--tool', {tool!r}]\n"
            f"os.execv(sys.argv[{command}], sys.argv[{command}:])\n"
        )

    stand_in("racecheck", 7)
    assert run_parts([checked], tmp_path / "out", 60) == 0
    assert outcomes(capsys.readouterr().out) == {"checked": "ok"}
    refused = Part("refused", ("-c", "import sys; sys.exit('Device not supported')"), 0, "memcheck")
    stand_in("memcheck", 9)
    assert run_parts([refused], tmp_path / "out", 60) == 0
    assert "refused" in (found := outcomes(capsys.readouterr().out))
    assert found["refused"] == "skipped: compute-sanitizer cannot check this device"


def test_names_are_different() -> None:
    assert len({part.name for part in PARTS}) == len(PARTS)
