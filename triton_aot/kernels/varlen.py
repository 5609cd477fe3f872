"""Which sequence, and which tile of it, a program of a varlen grid works on."""

import triton
import triton.language as tl


@triton.jit
def sequence_of_tile(cu_seqlens, num_seqs, index, TILE: tl.constexpr, SPARE: tl.constexpr):
    """(sequence b, tile within it) of program `index`, without a list of tiles: sequence b gets the
    indices from cu_seqlens[b] // TILE + SPARE * b on, which are at least len // TILE + SPARE many.
    The grid is T // TILE + SPARE * B; a tile that starts past the end of its sequence is empty."""
    low = 0
    high = num_seqs - 1
    while low < high:
        middle = (low + high + 1) // 2
        if tl.load(cu_seqlens + middle) // TILE + SPARE * middle <= index:
            low = middle
        else:
            high = middle - 1
    return low, index - (tl.load(cu_seqlens + low) // TILE + SPARE * low)
