"""What every test shares: GPU tests are skipped, with the reason, where no GPU answers."""

from __future__ import annotations

import functools

import pytest


@functools.cache
def why_no_gpu() -> str | None:
    """None where CuPy sees a device, else the reason; asked once, when a GPU test is to run."""
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
    except ImportError as error:
        return f"CuPy is not installed ({error})"
    except Exception as error:  # CUDARuntimeError: no driver, or none new enough
        return f"no NVIDIA GPU ({error})"
    return None if count else "no NVIDIA GPU"


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
        pytest.skip(reason)
