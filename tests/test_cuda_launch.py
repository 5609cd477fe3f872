"""Packing of kernel arguments and launch attributes, against a driver that only reads them."""

from __future__ import annotations

import ctypes
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from deltaserve.engine.ops.cuda.kernels import Blocks
from deltaserve.engine.ops.cuda.launch import KernelLauncher, _Attribute, _Config
from deltaserve.engine.ops.cuda.tensor_maps import TensorMaps


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


def test_tensor_maps_are_passed_whole_and_aligned() -> None:
    whole = ctypes.c_char * 128
    driver = Driver([ctypes.c_uint64, whole, ctypes.c_int32, whole, ctypes.c_uint64])
    launch = KernelLauncher(driver, 1, ["u64", "map", "i32", "map"], threads=32, extra=(6,))
    first, second = bytes(range(1, 129)), b"\xff" * 128
    launch(0, (1, 1, 1), 0, (5, first, -3, second))
    assert driver.launches[0]["values"] == [5, first, -3, second, 6]
    assert all(launch._params[i] % 64 == 0 for i in (1, 3))


class MapDriver:
    """Notes what is to be encoded, and writes the count of calls into the map."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def cuTensorMapEncodeTiled(self, where: Any, *args: Any) -> int:
        assert where.value % 64 == 0
        self.calls.append(tuple(list(a) if hasattr(a, "_length_") else a for a in args))
        ctypes.memset(where.value, len(self.calls), 128)
        return 0 if args[1] < 4 else 1


def test_a_tensor_map_is_encoded_once_for_an_array_and_shape() -> None:
    driver = MapDriver()
    maps = TensorMaps(driver)
    x, w = FakeArray(4096, ml_dtypes.bfloat16), FakeArray(8192, ml_dtypes.bfloat16)
    cuts = [
        {"block_size": [128, 64], "swizzle": 3, "elem_size": 2},
        {"block_size": [2, 48, 64], "swizzle": 3, "elem_size": 2},
    ]
    args = (Blocks(x, (5, 256)), Blocks(w, (2, 96, 256)), 7)
    for _ in range(2):
        values = maps.expand(cuts, args)
        first, second = b"\x01" * 128, b"\x02" * 128
        assert values == [first, 5, 256, 256, 1, second, 2, 96, 256, 24576, 256, 1, 7]
    maps.expand(cuts[:1], (Blocks(x, (6, 256)),))
    assert len(driver.calls) == 3
    kind, rank, pointer, sizes, strides, block, steps, *rest = driver.calls[1]
    assert (kind, rank, pointer.value) == (9, 3, 8192)
    assert (sizes, strides[:2], block, steps) == ([256, 96, 2], [512, 49152], [64, 48, 2], [1] * 3)
    assert rest == [0, 3, 2, 0]


def test_a_bare_map_comes_without_sizes_and_strides() -> None:
    """And is not taken for the map of the same array that brings them."""
    driver = MapDriver()
    maps = TensorMaps(driver)
    cut = {"block_size": [128, 64], "swizzle": 3, "elem_size": 2}
    blocks = Blocks(FakeArray(4096, ml_dtypes.bfloat16), (5, 256))
    for _ in range(2):
        assert maps.expand([{**cut, "bare": True}], (blocks, 7)) == [b"\x01" * 128, 7]
        assert maps.expand([cut], (blocks, 7)) == [b"\x02" * 128, 5, 256, 256, 1, 7]
    assert len(driver.calls) == 2


def test_a_tensor_map_that_the_driver_refuses() -> None:
    cut = {"block_size": [1, 1, 1, 1], "swizzle": 0, "elem_size": 4}
    with pytest.raises(RuntimeError, match="CUDA error 1"):
        TensorMaps(MapDriver()).expand([cut], (Blocks(FakeArray(0, "f4"), (1, 1, 1, 1)),))
