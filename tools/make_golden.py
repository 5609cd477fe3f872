"""Writes tests/golden: what transformers computes for the models of tests/model_cases.py.

    python -m tools.make_golden

Needs torch and transformers (the `test-hf` extra). Run it when a case changes.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.hf_model import hf_trace, load
from tests.model_cases import CASES, GOLDEN, golden, input_ids, write_case


def main() -> None:
    GOLDEN.mkdir(exist_ok=True)
    for case in CASES:
        with tempfile.TemporaryDirectory() as directory:
            write_case(case, Path(directory))
            arrays: dict[str, Any] = golden(hf_trace(load(Path(directory)), input_ids(case)))
        path = GOLDEN / f"{case}.npz"
        np.savez_compressed(path, **arrays)
        print(f"{path.name}: {path.stat().st_size} bytes, {len(arrays)} arrays")


if __name__ == "__main__":
    main()
