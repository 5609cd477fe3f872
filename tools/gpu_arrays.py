"""Random and poisoned arrays on the GPU for checks and timings, and what two results differ by."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)
_BLOCK = 1 << 22


class Arrays:
    """Makes arrays from one seed. `cupy` is the module."""

    def __init__(self, cupy: Any, seed: int) -> None:
        self.cupy = cupy
        self.rng = np.random.default_rng(seed)
        self._blocks: dict[tuple[Any, float], Any] = {}

    def act(self, *shape: int, scale: float = 1.0) -> Any:
        """Fresh normal bf16 values."""
        values = self.rng.standard_normal(shape, dtype=np.float32) * np.float32(scale)
        return self.cupy.asarray(values.astype(BF16))

    def fp32(self, *shape: int) -> Any:
        return self.cupy.asarray(self.rng.standard_normal(shape, dtype=np.float32))

    def int32(self, values: Any) -> Any:
        return self.cupy.asarray(np.asarray(values, np.int32))

    def poisoned(self, *shape: int, dtype: Any = BF16) -> Any:
        """NaN bit patterns."""
        out = self.cupy.empty(shape, dtype)
        out.view("uint8")[...] = 0xFF
        return out

    def filled(self, *shape: int, dtype: Any = BF16, scale: float = 1.0) -> Any:
        """A large array: one random block again and again, for timings."""
        key = np.dtype(dtype), scale
        if key not in self._blocks:
            block = self.rng.standard_normal(_BLOCK, dtype=np.float32)
            self._blocks[key] = self.cupy.asarray((block * np.float32(scale)).astype(dtype))
        source = self._blocks[key]
        out = self.cupy.empty(shape, dtype)
        flat = out.reshape(-1)
        for begin in range(0, flat.size, _BLOCK):
            end = min(begin + _BLOCK, flat.size)
            flat[begin:end] = source[: end - begin]
        return out

    def host(self, array: Any) -> np.ndarray:
        """On the host, bf16 as float32."""
        values = self.cupy.asnumpy(array)
        return values.astype(np.float32) if values.dtype == BF16 else values


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """||actual - expected|| / ||expected||; NaN where anything was not written."""
    difference = actual.astype(np.float64) - expected.astype(np.float64)
    size = float(np.linalg.norm(expected.astype(np.float64)))
    return float(np.linalg.norm(difference)) / max(size, 1e-30)
