"""Matrix products whose rows do not see each other.

BLAS adds a row's products in an order that depends on how many rows there are and on where among
them the row is: a micro-kernel that takes six rows at a time adds otherwise than the one that takes
the four that are left over. (Shapes that divide by the block sizes are no help: with 16 rows as
columns of the weight's product, rows 0-5, 6-11 and 12-15 differ at any N and KD.) Two forms avoid
this by construction:

- prompt rows go in tiles of 16 as the *vectorised* side of the product, out^T = weight @ x^T: the
  16 rows are lanes of the same instructions, and every call has the same shape;
- decode rows are one matrix-vector product each. It reads the weight once a row, which for a few
  rows is what it costs anyway, and there is no padding.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .activations import silu
from .rounding import F32, Act
from .row_threads import for_rows

TILE = 16
_GATE_UP_ROWS = 64

Linear = Callable[[F32, F32, F32], None]


def linear_tiles(x: F32, weight: F32, out: F32) -> None:
    """out = x @ weight^T, fp32, in tiles of 16 rows (zero-padded)."""

    def tiles(first: int, last: int) -> None:
        columns = np.empty((weight.shape[0], TILE), np.float32)
        for start in range(first * TILE, min(last * TILE, len(x)), TILE):
            rows = x[start : start + TILE]
            count = len(rows)
            if count < TILE:
                padded = np.zeros((TILE, x.shape[1]), np.float32)
                padded[:count] = rows
                rows = padded
            np.matmul(weight, rows.T, out=columns)
            out[start : start + count] = columns.T[:count]

    for_rows(-(-len(x) // TILE), tiles)


def linear_rows(x: F32, weight: F32, out: F32) -> None:
    """out = x @ weight^T, fp32, one matrix-vector product a row."""

    def product(start: int, end: int) -> None:
        np.matmul(x[start:end, None, :], weight.T, out=out[start:end, None, :])

    for_rows(len(x), product)


def linear_silu_mul(x: F32, weight: F32, out: F32, linear: Linear, act: Act) -> None:
    """See `Ops.linear_silu_mul`, over one of the two forms above."""
    width = out.shape[1]
    gate_up = np.empty((min(len(x), _GATE_UP_ROWS), 2 * width), np.float32)
    for start in range(0, len(x), _GATE_UP_ROWS):
        rows, target = x[start : start + _GATE_UP_ROWS], out[start : start + _GATE_UP_ROWS]
        block = gate_up[: len(rows)]
        linear(rows, weight, block)
        act(block)
        gate = silu(block[:, :width])
        act(gate)
        np.multiply(gate, block[:, width:], out=target)
        act(target)
