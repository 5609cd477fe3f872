"""What GPU this machine has, and whether the compiled kernels run on it. Loads no CuPy."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute
_FIRST_DRIVER = {"sm_100": 12_080, "sm_103": 12_090, "sm_120": 12_080, "sm_121": 12_090}
"""CUDA versions that knew an architecture first, where that is later than 12.0."""


@dataclass(frozen=True)
class Gpu:
    """`driver`: the CUDA version that the driver speaks, as 12080 for 12.8."""

    arch: str
    driver: int


def find_gpus() -> list[Gpu]:
    """The GPUs that the NVIDIA driver shows this process; none without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    if cuda.cuInit(0) != 0:
        return []

    def value(function: Any, *arguments: Any) -> int:
        result = ctypes.c_int(0)
        return result.value if function(ctypes.byref(result), *arguments) == 0 else 0

    driver = value(cuda.cuDriverGetVersion)
    gpus = []
    for index in range(value(cuda.cuDeviceGetCount)):
        device = value(cuda.cuDeviceGet, index)
        major = value(cuda.cuDeviceGetAttribute, _CAPABILITY_MAJOR, device)
        minor = value(cuda.cuDeviceGetAttribute, _CAPABILITY_MINOR, device)
        gpus.append(Gpu(f"sm_{major}{minor}", driver))
    return gpus


def has_usable_gpu() -> bool:
    """CuPy is installed, and the NVIDIA driver is there and shows at least one GPU."""
    return find_spec("cupy") is not None and bool(find_gpus())


def check_gpu(gpu: Gpu, manifest: dict[str, Any]) -> None:
    """ValueError, with what would do, where the manifest's kernels cannot run on the GPU."""
    archs = sorted(manifest["archs"], key=lambda arch: int(arch.removeprefix("sm_")))
    if gpu.arch not in archs:
        raise ValueError(f"this GPU is {gpu.arch}; kernels are compiled for {', '.join(archs)}")
    # What a compiler of one major version makes runs on all drivers of it, not on earlier ones.
    compiler = int(manifest["compilers"].get("nvrtc", "12").partition(".")[0])
    needed = {arch: max(_FIRST_DRIVER.get(arch, 12_000), compiler * 1000) for arch in archs}
    if gpu.driver < needed[gpu.arch]:
        each = ", ".join(f"{arch}: {_version(version)}" for arch, version in needed.items())
        raise ValueError(
            f"this machine's NVIDIA driver is for CUDA {_version(gpu.driver)}; the kernels need a"
            f" driver for this version or later: {each}"
        )


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
