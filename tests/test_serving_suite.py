"""tools/serving_suite.py on servers of the demo model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tools import serving_suite

ROOT = Path(__file__).resolve().parent.parent


def run(out: Path, *words: str) -> tuple[int, dict[str, Any]]:
    model = ["--model-path", str(ROOT / "models/demo"), "--serve-flags=--device=cpu"]
    status = serving_suite.main(["--out", str(out), *model, *words])
    return status, json.loads(out.read_text())


def test_table_and_equal_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = "c=1 1/256"
    monkeypatch.setattr(serving_suite, "LOADED_CELLS", (cell,))
    out = tmp_path / "result.json"
    words = ("--only", "table", "equal", "--quick", "--cells", cell)
    status, found = run(out, *words)
    # one request at a time never lacks a block
    assert status == 1
    assert found["failures"] == ["equal: nothing was preempted with 1500M of KV cache"]
    results = found["results"]
    assert results["table"]["cells"][0]["name"] == cell
    graphs, eager = (results[n]["cells"][0]["runs"][0]["hashes"] for n in ("graphs", "no graphs"))
    assert graphs == eager and len(set(graphs)) == 4


def test_the_share_of_the_engine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cell = "c=1 1/256"
    monkeypatch.setattr(serving_suite, "ALONE", ((1,), 1, 256))
    words = ("--only", "table", "engine", "--quick", "--cells", cell, "--rounds", "2")
    status, found = run(tmp_path / "result.json", *words, "--min-share", "1000")
    (alone,) = found["results"]["engine"]
    served = found["results"]["table"]["cells"][0]["median"]["output_tokens_per_s"]
    assert alone["served_share"] == pytest.approx(served / alone["output_tokens_per_s"])
    assert status == 1
    assert found["failures"] == [f"engine: {cell}: {alone['served_share']:.3f} of it served"]


def test_a_server_that_does_not_start_is_a_failure(tmp_path: Path) -> None:
    status, found = run(
        tmp_path / "result.json", "--only", "table", "--serve-flags=--kv-cache-memory=1"
    )
    assert status == 1
    assert "table: the server was not ready" in found["failures"][-1]


def test_a_checkout_that_is_not_installed_knows_its_version(tmp_path: Path) -> None:
    code = (
        "from tools.gpu_check import make_importable; make_importable();"
        "from deltaserve.server.version import version; print(version())"
    )
    where = [path for path in sys.path if "site-packages" in path]
    # -S: no editable installation; the packages themselves stay
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *where])}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
