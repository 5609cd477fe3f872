"""Batches for op tests, from what matters in them."""

from __future__ import annotations

import numpy as np

from deltaserve.engine.forward_batch import DecodeBatch, PrefillBatch


def prefill_batch(
    spans: list[tuple[int, int]],
    slots: list[int],
    initial_slots: list[int] | None = None,
    snapshots: list[list[tuple[int, int]]] | None = None,
) -> PrefillBatch:
    """Sequence i runs positions spans[i][0] .. spans[i][1] - 1 in state slot slots[i], and writes
    its state at the positions of snapshots[i] to the slots beside them. It starts from the state
    of initial_slots[i], by default its own or, at position 0, zeros."""
    if initial_slots is None:
        initial_slots = [s if span[0] else -1 for s, span in zip(slots, spans, strict=True)]
    snapshots = snapshots or [[] for _ in spans]
    pairs = np.array([pair for own in snapshots for pair in own], np.int32).reshape(-1, 2)
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
        initial_slots=np.array(initial_slots, np.int32),
        snapshot_starts=np.cumsum([0, *map(len, snapshots)], dtype=np.int32),
        snapshot_positions=pairs[:, 0].copy(),
        snapshot_slots=pairs[:, 1].copy(),
        logits_rows=cu_seqlens[1:] - 1,
        host_cu_seqlens=tuple(cu_seqlens.tolist()),
        host_start_positions=tuple(starts.tolist()),
        host_state_slots=tuple(slots),
        host_initial_slots=tuple(initial_slots),
        host_snapshots=tuple(map(tuple, snapshots)),
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
