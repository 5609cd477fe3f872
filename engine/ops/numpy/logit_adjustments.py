"""How a row's raw logits change before the draw, and the counting of sampled ids.

In fp32, each operation rounded by itself (no fused multiply-add), in this order, for an id that
the output has c times:

    seen in prompt or output    x = x / repetition if x > 0 else x * repetition
    c > 0                       x = (x - frequency * c) - presence
    listed                      x = x + bias
    then                        x = the nearest finite number
    bias -inf, or not allowed, or masked, or an end id before min_tokens:    x = -inf

So an id that may not be sampled has no mass, and all others have finite logits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ...forward_batch import (
    ALLOWED_IDS,
    LISTED_IDS,
    PENALTIES,
    STOPS_FORBIDDEN,
    LogitAdjustments,
)

F32 = npt.NDArray[np.float32]
U32 = npt.NDArray[np.uint32]

MAX_COUNT = 0xFFFF
_LARGEST = np.finfo(np.float32).max


def adjust(
    row: F32, features: int, slot: int, state: LogitAdjustments | None, mask: U32 | None
) -> F32:
    """The changed logits fp32 [N] of `slot` for a finite row of the first N ids. `state` may be
    None without features; `mask`: a row of `SampleBatch.masks`."""
    row = row.copy()
    forbidden = np.zeros(len(row), bool)
    if state is not None:
        _apply(features, slot, state, row, forbidden)
    if mask is not None:
        forbidden |= ~bits(mask, len(row))
    row[forbidden] = -np.inf
    return row


def _apply(
    features: int,
    slot: int,
    state: LogitAdjustments,
    row: F32,
    forbidden: npt.NDArray[np.bool_],
) -> None:
    with np.errstate(over="ignore"):
        if features & PENALTIES:
            row[:] = _penalised(row, slot, state)
        if features & (LISTED_IDS | STOPS_FORBIDDEN):
            count = int(state.num_listed[slot])
            entries, biases = state.listed_ids[slot, :count], state.listed_biases[slot, :count]
            within = entries >> 1 < len(row)
            entries, biases = entries[within], biases[within]
            if features & STOPS_FORBIDDEN:
                forbidden[entries[entries & 1 == 1] >> 1] = True
            if features & LISTED_IDS:
                banned = biases == -np.inf
                forbidden[entries[banned] >> 1] = True
                row[entries[~banned] >> 1] += biases[~banned]
    np.clip(row, -_LARGEST, _LARGEST, out=row)
    if features & ALLOWED_IDS:
        forbidden |= ~bits(state.allowed_ids[slot], len(row))


def _penalised(row: F32, slot: int, state: LogitAdjustments) -> F32:
    counts = state.output_counts[slot].view(np.uint16)[: len(row)]
    repetition = state.repetition_penalty[slot]
    penalised = np.where(row > 0, row / repetition, row * repetition)
    row = np.where((counts > 0) | bits(state.prompt_ids[slot], len(row)), penalised, row)
    frequency = state.frequency_penalty[slot] * counts.astype(np.float32)
    lowered = (row - frequency) - state.presence_penalty[slot]
    result: F32 = np.where(counts > 0, lowered, row)
    return result


def count_id(token_id: int, slot: int, state: LogitAdjustments) -> None:
    counts = state.output_counts[slot].view(np.uint16)
    counts[token_id] = min(int(counts[token_id]) + 1, MAX_COUNT)


def bits(words: U32, count: int) -> npt.NDArray[np.bool_]:
    """The first `count` bits of uint32 words, the lowest of each word first."""
    as_bytes: npt.NDArray[Any] = words.astype("<u4", copy=False).view(np.uint8)
    return np.unpackbits(as_bytes, count=count, bitorder="little").view(np.bool_)
