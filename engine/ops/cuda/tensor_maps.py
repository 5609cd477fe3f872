"""Tensor maps (CUtensorMap): how the copy engine of sm_90 and later cuts an array into blocks.

A kernel takes one by value. It is encoded on the host, once for each array and shape: a kernel that
makes its own descriptors takes some 2 us longer.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from .kernels import Blocks

_BYTES, _ALIGN = 128, 64
_BFLOAT16, _FLOAT32 = 9, 7  # CUtensorMapDataType
_DATA_TYPES = {2: _BFLOAT16, 4: _FLOAT32}
_L2_PROMOTION_128B = 2
_MAX_KNOWN = 1 << 12


class TensorMaps:
    """Encodes and remembers. `driver`: libcuda, or what stands for it in tests."""

    def __init__(self, driver: Any) -> None:
        self._encode = driver.cuTensorMapEncodeTiled
        self._known: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def expand(self, cuts: Sequence[dict[str, Any]], args: Sequence[Any]) -> list[Any]:
        """Launch arguments, with the map, sizes and strides in place of each `Blocks`. `cuts`: one
        for each of those, as the manifest has them."""
        values: list[Any] = []
        remaining = iter(cuts)
        for argument in args:
            if isinstance(argument, Blocks):
                values += self._map(next(remaining), argument)
            else:
                values.append(argument)
        return values

    def _map(self, cut: dict[str, Any], blocks: Blocks) -> tuple[Any, ...]:
        pointer, block = blocks.array.data.ptr, tuple(cut["block_size"])
        key = (pointer, blocks.shape, block, cut["swizzle"], cut["elem_size"], cut.get("bare"))
        found = self._known.get(key)
        if found is None:
            if len(self._known) >= _MAX_KNOWN:
                self._known.clear()
            found = self._known[key] = self._encoded(pointer, blocks.shape, block, cut)
        return found

    def _encoded(
        self, pointer: int, shape: tuple[int, ...], block: tuple[int, ...], cut: dict[str, Any]
    ) -> tuple[Any, ...]:
        """(bytes, *shape, *strides), or the bytes alone. The driver counts dimensions from the
        innermost, and strides in bytes, without the innermost."""
        rank, size = len(shape), cut["elem_size"]
        strides = [1]
        for extent in shape[:0:-1]:
            strides.insert(0, strides[0] * extent)
        memory = (ctypes.c_char * (_BYTES + _ALIGN))()
        start = -ctypes.addressof(memory) % _ALIGN
        status = self._encode(
            ctypes.c_void_p(ctypes.addressof(memory) + start),
            _DATA_TYPES[size],
            rank,
            ctypes.c_void_p(pointer),
            (ctypes.c_uint64 * rank)(*shape[::-1]),
            (ctypes.c_uint64 * rank)(*(size * stride for stride in strides[-2::-1])),
            (ctypes.c_uint32 * rank)(*block[::-1]),
            (ctypes.c_uint32 * rank)(*(1,) * rank),
            0,  # not interleaved
            cut["swizzle"],
            _L2_PROMOTION_128B,
            0,  # zeros past the end
        )
        if status:
            raise RuntimeError(f"cuTensorMapEncodeTiled: CUDA error {status}, {shape} by {block}")
        encoded = memory.raw[start : start + _BYTES]
        return (encoded,) if cut.get("bare") else (encoded, *shape, *strides)
