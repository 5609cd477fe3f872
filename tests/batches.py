"""Batches for op tests, from what matters in them."""

from __future__ import annotations

import numpy as np

from deltaserve.engine.forward_batch import DecodeBatch, PrefillBatch


def prefill_batch(spans: list[tuple[int, int]], slots: list[int]) -> PrefillBatch:
    """Sequence i runs positions spans[i][0] .. spans[i][1] - 1 in state slot slots[i]."""
    cu_seqlens = np.cumsum([0, *(end - start for start, end in spans)]).astype(np.int32)
    starts = np.array([start for start, _ in spans], np.int32)
    positions = np.concatenate([np.arange(*span, dtype=np.int32) for span in spans])
    zeros = np.zeros(len(positions), np.int32)
    return PrefillBatch(
        input_ids=zeros,
        positions=positions,
        slot_mapping=zeros,
        cu_seqlens=cu_seqlens,
        start_positions=starts,
        state_slots=np.array(slots, np.int32),
        logits_rows=cu_seqlens[1:] - 1,
        host_cu_seqlens=tuple(cu_seqlens.tolist()),
        host_start_positions=tuple(starts.tolist()),
        host_state_slots=tuple(slots),
    )


def decode_batch(positions: list[int], slots: list[int]) -> DecodeBatch:
    """Row i is at positions[i] in state slot slots[i]; ids and slot mapping are 0."""
    zeros = np.zeros(len(positions), np.int32)
    return DecodeBatch(
        input_ids=zeros.copy(),
        positions=np.array(positions, np.int32),
        state_slots=np.array(slots, np.int32),
        slot_mapping=zeros.copy(),
    )
