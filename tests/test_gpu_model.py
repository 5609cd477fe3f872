"""The whole model on this machine's GPU: the checks of tools/gpu_model_check.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.demo_parity import demo_checks
from tools.gpu_model_check import ROOT, free_memory

pytestmark = pytest.mark.gpu


def test_demo_model() -> None:
    """Its greedy texts against the NumPy ops, and equal bits whatever the batch and chunks."""
    rows = list(demo_checks(ROOT / "models/demo", "cuda", free_memory))
    assert [row for row in rows if not row["ok"]] == []


@pytest.mark.hf
@pytest.mark.parametrize("size", ["0.8B", "4B"])
def test_parity_with_transformers(size: str, tmp_path: Path) -> None:
    from tools.gpu_model_check import main

    out = tmp_path / "parity.json"
    assert main(["--only", "parity", "--sizes", size, "--out", str(out)]) == 0
