"""RMS norms, and the additions to the residual stream that they are fused with.

A row is squared into contiguous memory and summed along its last axis, so that its sum has one
order whatever the number of rows.
"""

from __future__ import annotations

import numpy as np

from .activations import silu
from .rounding import F32, Act

_ONE = np.float32(1)


def root_mean_square(x: F32, eps: float) -> F32:
    """sqrt(mean(x^2) + eps) over the last axis, which is kept with length 1."""
    scale = square_sum(x)
    scale *= np.float32(1 / x.shape[-1])
    scale += np.float32(eps)
    return np.sqrt(scale, out=scale)


def square_sum(x: F32) -> F32:
    """sum(x^2) over the last axis, which is kept with length 1."""
    squares = np.square(x, order="C")
    total: F32 = np.add.reduce(squares, axis=-1, keepdims=True)
    return total


def rms_norm(x: F32, weight: F32, eps: float, out: F32, act: Act) -> None:
    """See `Ops.rms_norm`; x and out of any shape [..., H]."""
    np.divide(x, root_mean_square(x, eps), out=out)
    out *= weight + _ONE
    act(out)


def add_rms_norm(branch: F32, residual: F32, weight: F32, eps: float, out: F32, act: Act) -> None:
    """See `Ops.add_rms_norm`."""
    residual += branch
    act(residual)
    rms_norm(residual, weight, eps, out, act)


def add_rms_norm_partials(
    partials: F32, residual: F32, weight: F32, eps: float, out: F32, act: Act
) -> None:
    """See `Ops.add_rms_norm_partials`; overwrites partials[0]."""
    branch = partials[0]
    for segment in partials[1:]:
        branch += segment
    act(branch)
    add_rms_norm(branch, residual, weight, eps, out, act)


def gated_rms_norm(x: F32, z: F32, weight: F32, eps: float, out: F32, act: Act) -> None:
    """See `Ops.gated_rms_norm`; x, z and out [T, HV, V], out may be x."""
    np.divide(x, root_mean_square(x, eps), out=out)
    act(out)
    out *= weight
    act(out)
    out *= silu(z)
    act(out)
