"""RMS norms, and the additions to the residual stream that they are fused with: cuda/rms_norm.cu
and cuda/gated_rms_norm.cu."""

from __future__ import annotations

from typing import Any

from .kernels import Kernels

Array = Any

_COLUMNS = 8  # a thread
_WARP = 32
_HEADS = 4  # a block of gated_rms_norm


def row_threads(hidden_size: int) -> int:
    """Threads of a block that holds a row of the residual stream."""
    assert hidden_size % _COLUMNS == 0 and hidden_size <= 8192, hidden_size
    return -(-hidden_size // _COLUMNS // _WARP) * _WARP


def rms_norm(kernels: Kernels, x: Array, weight: Array, eps: float, out: Array) -> None:
    rows, size = x.shape
    kernels.launch("rms_norm", (rows, 1, 1), row_threads(size), x, weight, eps, out, size)


def add_rms_norm(
    kernels: Kernels, branch: Array, residual: Array, weight: Array, eps: float, out: Array
) -> None:
    rows, size = residual.shape
    args = (branch, residual, weight, eps, out, size)
    kernels.launch("add_rms_norm", (rows, 1, 1), row_threads(size), *args)


def add_rms_norm_partials(
    kernels: Kernels, partials: Array, residual: Array, weight: Array, eps: float, out: Array
) -> None:
    rows, size = residual.shape
    assert partials.shape[1:] == residual.shape
    args = (partials, residual, weight, eps, out, size, partials.shape[0])
    kernels.launch("add_rms_norm_partials", (rows, 1, 1), row_threads(size), *args)


def gated_rms_norm(
    kernels: Kernels, x: Array, qkvzba: Array, weight: Array, eps: float, out: Array
) -> None:
    tokens, value_size = x.shape
    head_dim = len(weight)
    value_heads = value_size // head_dim
    key_heads = (qkvzba.shape[1] - 2 * value_size - 2 * value_heads) // (2 * head_dim)
    assert head_dim == 128, head_dim
    grid = (-(-value_heads // _HEADS), tokens, 1)
    args = (x, qkvzba, weight, eps, out, key_heads, value_heads)
    kernels.launch("gated_rms_norm", grid, _HEADS * _WARP, *args)
