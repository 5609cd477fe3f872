"""Runs the Triton kernels on the CPU, in Triton's interpreter.

Triton decides when a kernel is defined whether it is interpreted, so a test module imports
`kernels` from here before anything else imports Triton. The interpreter takes CPU torch tensors;
its `tl.dot` is right on fp32 alone, so pointers are fp32 and the act roundings do nothing.
"""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

TRITON_AOT = Path(__file__).resolve().parent.parent / "triton_aot"


def load_kernels(module: str) -> ModuleType:
    """triton_aot/kernels/<module>.py, interpreted. Skips the calling test module without Triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    if str(TRITON_AOT) not in sys.path:
        sys.path.insert(0, str(TRITON_AOT))
    return importlib.import_module(f"kernels.{module}")
