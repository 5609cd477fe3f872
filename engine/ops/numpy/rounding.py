"""Rounding to the activation type: the NumPy backend's arrays are float32 whatever it is."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]

Act = Callable[[F32], None]
"""What ">act" in `ops.base` is: `keep_fp32` or `round_to_bf16`, in place."""

_HALF = np.uint32(0x7FFF)
_ONE = np.uint32(1)
_SHIFT = np.uint32(16)
_KEPT = np.uint32(0xFFFF0000)


def keep_fp32(x: F32) -> None:
    """Full precision: nothing to do."""


def round_to_bf16(x: F32) -> None:
    """Each value becomes the nearest bf16, ties to even; infinities and quiet NaNs stay.

    In place; any layout.
    """
    bits = x.view(np.uint32)
    odd = bits >> _SHIFT
    odd &= _ONE
    odd += _HALF
    bits += odd
    bits &= _KEPT
