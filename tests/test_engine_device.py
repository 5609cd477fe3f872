"""The CPU device: order, errors, and how much host memory it reports."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from deltaserve.engine.ops.numpy.blas_threads import ENVIRONMENT
from deltaserve.engine.ops.numpy.device import CpuDevice, host_memory


@pytest.fixture
def device() -> CpuDevice:
    return CpuDevice()


def test_work_runs_in_order_behind_the_caller(device: CpuDevice) -> None:
    gate = threading.Event()
    order: list[int] = []
    first = device.submit(lambda: (gate.wait(), order.append(1)))
    second = device.submit(lambda: order.append(2) or len(order))
    assert order == []  # submit has returned, the work waits
    gate.set()
    assert second.wait() == 2
    first.wait()
    assert order == [1, 2]
    device.close()


def test_wait_raises_what_the_work_raised(device: CpuDevice) -> None:
    failing = device.submit(lambda: 1 // 0)
    after = device.submit(lambda: "runs")
    with pytest.raises(ZeroDivisionError):
        failing.wait()
    assert after.wait() == "runs"
    device.close()


def test_close_finishes_submitted_work(device: CpuDevice) -> None:
    done: list[int] = []
    for i in range(5):
        device.submit(lambda i=i: done.append(i))
    device.close()
    assert done == list(range(5))
    device.close()


def test_download_copies(device: CpuDevice) -> None:
    array, out = device.zeros((3,), "float32"), np.ones(3, np.float32)
    device.download(array, out)
    array[0] = 5
    assert out.tolist() == [0, 0, 0]
    device.close()


MEMINFO = "MemTotal:  1000 kB\nMemFree:  10 kB\nMemAvailable:  600 kB\nHugePages_Total:  0\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (600 << 10, 1000 << 10)),
        ({"memory.max": "max", "memory.current": "5"}, (600 << 10, 1000 << 10)),
        ({"memory.max": str(500 << 10), "memory.current": "1024"}, (499 << 10, 500 << 10)),
        ({"memory.max": "100", "memory.current": "500"}, (0, 100)),
        ({"memory.max": str(900 << 10), "memory.current": "0"}, (600 << 10, 900 << 10)),
        (
            {
                "memory/memory.limit_in_bytes": str(500 << 10),
                "memory/memory.usage_in_bytes": str(100 << 10),
            },
            (400 << 10, 500 << 10),
        ),
        ({"memory/memory.limit_in_bytes": str(2**63 - 4096)}, (600 << 10, 1000 << 10)),
    ],
)
def test_host_memory_within_the_control_group(
    tmp_path: Path, files: dict[str, str], expected: tuple[int, int]
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(MEMINFO)
    cgroup = tmp_path / "cgroup"
    for name, content in files.items():
        (cgroup / name).parent.mkdir(parents=True, exist_ok=True)
        (cgroup / name).write_text(content + "\n")
    assert host_memory(meminfo, cgroup) == expected


def test_blas_threads_of_a_small_model() -> None:
    """In a fresh interpreter: the setting is the process's."""
    code = """
import ctypes, pathlib, numpy as np
from deltaserve.engine.ops.numpy.blas_threads import limit_blas_threads
libs = pathlib.Path(np.__file__).parent.with_name("numpy.libs").glob("lib*openblas*")
path = next(libs, None)
count = (lambda: 1) if path is None else ctypes.CDLL(str(path)).scipy_openblas_get_num_threads64_
before = count()
assert limit_blas_threads(1 << 40) is None and count() == before
limit_blas_threads(1 << 20)
assert count() == 1, count()
"""
    environment = {k: v for k, v in os.environ.items() if k not in ENVIRONMENT}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
