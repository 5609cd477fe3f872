"""sigmoid, SiLU and softplus. Elementwise, so a value's bits do not depend on its neighbours."""

from __future__ import annotations

import numpy as np

from .rounding import F32

_ONE = np.float32(1)


def sigmoid(x: F32) -> F32:
    """1 / (1 + e^-x), a fresh array."""
    out: F32 = np.negative(x, order="C")
    with np.errstate(over="ignore"):  # e^-x = inf gives 0
        np.exp(out, out=out)
    out += _ONE
    np.divide(_ONE, out, out=out)
    return out


def silu(x: F32) -> F32:
    """x / (1 + e^-x), a fresh array."""
    out: F32 = np.negative(x, order="C")
    with np.errstate(over="ignore"):
        np.exp(out, out=out)
    out += _ONE
    np.divide(x, out, out=out)
    return out


def softplus(x: F32) -> F32:
    """ln(1 + e^x), a fresh array."""
    with np.errstate(invalid="ignore"):  # NaN of a failed sequence
        out: F32 = np.logaddexp(np.float32(0), x)
    return out
