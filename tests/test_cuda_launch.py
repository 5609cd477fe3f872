"""Packing of kernel arguments and launch attributes, against a driver that only reads them."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from deltaserve.engine.ops.cuda.launch import KernelLauncher, _Attribute, _Config


class Pointer:
    def __init__(self, ptr: int) -> None:
        self.ptr = ptr


class FakeArray:
    def __init__(self, ptr: int, dtype: Any, contiguous: bool = True) -> None:
        self.data = Pointer(ptr)
        self.dtype = np.dtype(dtype)
        self._c_contiguous = contiguous


class Driver:
    """Reads a launch the way the driver does: each argument through its pointer."""

    def __init__(self, types: list[Any], status: int = 0) -> None:
        self.types = types
        self.status = status
        self.launches: list[dict[str, Any]] = []

    def cuLaunchKernelEx(self, config: Any, function: Any, params: Any, extra: Any) -> int:
        read = config._obj
        assert isinstance(read, _Config) and not extra.value
        values = [t.from_address(params[i]).value for i, t in enumerate(self.types)]
        attributes = []
        if read.num_attributes:
            attribute = _Attribute.from_address(read.attributes)
            attributes.append((attribute.id, attribute.value))
        self.launches.append(
            {
                "function": function.value,
                "grid": tuple(read.grid),
                "block": tuple(read.block),
                "shared": read.shared,
                "stream": read.stream,
                "values": values,
                "attributes": attributes,
            }
        )
        return self.status


TYPES = [ctypes.c_uint64, ctypes.c_int32, ctypes.c_float, ctypes.c_uint64, ctypes.c_uint64]


def test_struct_sizes_are_the_drivers() -> None:
    assert ctypes.sizeof(_Attribute) == 72
    assert ctypes.sizeof(_Config) == 56


def test_arguments_arrive_in_order_with_their_types() -> None:
    driver = Driver([*TYPES, ctypes.c_uint64, ctypes.c_uint64])
    signature = ["*bf16", "i32", "fp32", "u64", "*i32"]
    launch = KernelLauncher(driver, 77, signature, threads=96, shared=50_000, extra=(5, 0))
    array = FakeArray(1 << 47, ml_dtypes.bfloat16)
    launch(3, (4, 5, 6), 0, (array, -2, 1.5, 2**64 - 1, None))
    launch(9, (1, 1, 1), 128, (array, np.int32(7), np.float32(0.25), 0, FakeArray(64, np.int32)))
    first, second = driver.launches
    assert first["values"] == [1 << 47, -2, 1.5, 2**64 - 1, 0, 5, 0]
    assert second["values"] == [1 << 47, 7, 0.25, 0, 64, 5, 0]
    assert (first["function"], first["shared"], first["stream"]) == (77, 50_000, 3)
    assert (first["grid"], first["block"]) == ((4, 5, 6), (96, 1, 1))
    assert (second["grid"], second["block"], second["stream"]) == ((1, 1, 1), (128, 1, 1), 9)
    assert first["attributes"] == []


def test_a_kernel_that_waits_by_itself_may_start_early() -> None:
    driver = Driver([])
    KernelLauncher(driver, 1, [], threads=32, may_start_early=True)(0, (1, 1, 1), 0, ())
    assert driver.launches[0]["attributes"] == [(6, 1)]


def test_wrong_arguments_and_refused_launches() -> None:
    launch = KernelLauncher(Driver([ctypes.c_uint64]), 1, ["*fp32"], threads=32)
    for bad in (FakeArray(8, np.int32), FakeArray(8, np.float32, contiguous=False)):
        with pytest.raises(AssertionError):
            launch(0, (1, 1, 1), 0, (bad,))
    with pytest.raises(ValueError):
        launch(0, (1, 1, 1), 0, ())
    refusing = KernelLauncher(Driver([], status=700), 1, [], threads=32)
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        refusing(0, (1, 1, 1), 0, ())
