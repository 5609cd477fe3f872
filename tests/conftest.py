"""What every test shares: GPU tests are skipped, with the reason, where no GPU answers; and
Hypothesis judges results, never how long a busy machine took to give them."""

from __future__ import annotations

import functools

import pytest
from hypothesis import HealthCheck, settings

UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("untimed", UNTIMED)
settings.load_profile("untimed")


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
        pytest.skip(reason)  # no CPU stands in for it; `make test-gpu` fails where there is no GPU
