"""Writes tests/golden: what transformers computes for the models of tests/model_cases.py.

    python -m tools.make_golden [CASE ...]

Needs torch and transformers (the `test-hf` extra). Run it when a case changes.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from tests.model_cases import CASES, GOLDEN, golden, input_ids, write_case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}; all")
    options = parser.parse_args()
    if unknown := set(options.cases) - set(CASES):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    from tests.hf_model import hf_trace, load

    GOLDEN.mkdir(exist_ok=True)
    for case in options.cases or CASES:
        with tempfile.TemporaryDirectory() as directory:
            write_case(case, Path(directory))
            arrays: dict[str, Any] = golden(hf_trace(load(Path(directory)), input_ids(case)))
        path = GOLDEN / f"{case}.npz"
        np.savez_compressed(path, **arrays)
        print(f"{path.name}: {path.stat().st_size} bytes, {len(arrays)} arrays")


if __name__ == "__main__":
    main()
