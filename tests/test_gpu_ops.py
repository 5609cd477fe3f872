"""Every CUDA op against the NumPy op on this machine's GPU: the checks of tools/gpu_check.py."""

from __future__ import annotations

from typing import Any

import pytest

from tools import gpu_gemm
from tools.gpu_arrays import Arrays
from tools.gpu_op_checks import CHECKS

pytestmark = pytest.mark.gpu

SEED = 20261130


@pytest.fixture(scope="module")
def kernels() -> Any:
    from deltaserve.engine.ops.cuda.loader import KernelLibrary

    return KernelLibrary()


@pytest.fixture(scope="module")
def arrays() -> Arrays:
    import cupy

    return Arrays(cupy, SEED)


@pytest.fixture(scope="module")
def ops(kernels: Any) -> Any:
    import cupy

    from deltaserve.engine.ops.cuda.ops import CudaOps, OpsShape

    return CudaOps(kernels, OpsShape(24, 48, 64, 1024), cupy.empty)


@pytest.mark.parametrize("name", CHECKS)
def test_op(name: str, ops: Any, arrays: Arrays) -> None:
    wrong = [result for result in CHECKS[name](ops, arrays) if not result[1] <= result[2]]
    assert wrong == []


def test_gemm_is_right(kernels: Any, arrays: Arrays) -> None:
    from deltaserve.engine.ops.cuda.gemm import Gemm

    wrong = [r for r in gpu_gemm.check_gemm(Gemm(kernels), arrays) if not r[1] <= r[2]]
    assert wrong == []


def test_gemm_rows_do_not_depend_on_the_batch(kernels: Any, arrays: Arrays) -> None:
    from deltaserve.engine.ops.cuda.gemm import Gemm

    assert [r for r in gpu_gemm.invariance_of_table(Gemm(kernels), arrays) if r[1]] == []
    assert [r for r in gpu_gemm.invariance_of_groups(Gemm(kernels), arrays) if r[1]] == []
