"""ScheduledBatch -> the index arrays a forward pass needs.

This module states what each array means; it owns none of the caches. Arrays are int32 unless said.
`Array` is numpy on the CPU and cupy on CUDA: the `build_*` functions make numpy arrays from what
the scheduler said, and pass each through `upload` (`Device.upload`). They read the sequences'
block tables, so they run before the scheduler is touched again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .scheduled_batch import BlockUpdate, ScheduledBatch, ScheduledDecode, ScheduledPrefill

Array = Any
Upload = Callable[[Any], Array]


@dataclass(frozen=True)
class DecodeBatch:
    """One generated token per row, B rows.

    `input_ids[b]` is the token fed at `positions[b]`, or -1 for "the id sampled in the previous
    step of this slot" until `Ops.prepare_decode` fills it in; `slot_mapping[b]` (the KV slot of
    that position) is filled in there too.
    """

    input_ids: Array
    positions: Array
    state_slots: Array
    slot_mapping: Array

    @property
    def num_rows(self) -> int:
        return len(self.positions)


@dataclass(frozen=True)
class PrefillBatch:
    """Prompt tokens of B sequences, T in all, one after the other.

        tokens of sequence b:  cu_seqlens[b] .. cu_seqlens[b+1]
        their positions:       start_positions[b], start_positions[b] + 1, ...
        state they start from: that of slot initial_slots[b], or zeros where it is -1
        state they leave:      in slot state_slots[b]
        its snapshots:         i in snapshot_starts[b] .. snapshot_starts[b+1]; the state after
                               snapshot_positions[i] tokens of the sequence, in snapshot_slots[i]

    State is the conv and the recurrent one. Snapshot positions are multiples of 64, ascending, and
    within (start, end] of their sequence. Slots written are distinct, and none of them is the
    initial slot of another sequence.

    `logits_rows` are the token rows (0..T-1) whose logits are wanted. `host_*` are the same values
    as tuples, for grid sizes and loops on the host.
    """

    input_ids: Array
    positions: Array
    slot_mapping: Array
    cu_seqlens: Array
    start_positions: Array
    state_slots: Array
    initial_slots: Array
    snapshot_starts: Array
    snapshot_positions: Array
    snapshot_slots: Array
    logits_rows: Array
    host_cu_seqlens: tuple[int, ...]
    host_start_positions: tuple[int, ...]
    host_state_slots: tuple[int, ...]
    host_initial_slots: tuple[int, ...]
    host_snapshots: tuple[tuple[tuple[int, int], ...], ...]
    """Per sequence its (position, slot) pairs."""

    @property
    def num_tokens(self) -> int:
        return self.host_cu_seqlens[-1]

    @property
    def num_seqs(self) -> int:
        return len(self.host_start_positions)


PENALTIES, LISTED_IDS, ALLOWED_IDS, STOPS_FORBIDDEN = 1, 2, 4, 8
"""Bits of `SampleBatch.features`: by which parts of `LogitAdjustments` a row's logits change.
Without a bit its part is not read, so it may hold what an earlier sequence left there.

PENALTIES: the three penalties, and the sampled id is counted. LISTED_IDS: the listed biases.
ALLOWED_IDS: the ids that may be sampled. STOPS_FORBIDDEN: listed end ids may not be (min_tokens).
"""


@dataclass(frozen=True)
class LogitAdjustments:
    """What the raw logits change by, by state slot.

    presence_penalty, frequency_penalty, repetition_penalty: fp32 [slots].
    output_counts: uint32 [slots, ceil(vocab / 2)], how often each id is in the output, saturating
        in 16 bits; those of an even id are the low half of word id // 2. `Ops.sample` counts.
    prompt_ids: uint32 [slots, ceil(vocab / 32)], bit id % 32 of word id // 32: in the prompt.
    allowed_ids: the same of ids that may be sampled.
    listed_ids: int32 [slots, L], ascending, each id once: 2 * id + (1 if it ends a sequence).
    listed_biases: fp32 [slots, L], what is added to the logits of those ids; -inf forbids one.
    num_listed: int32 [slots], how many of the L there are.
    """

    presence_penalty: Array
    frequency_penalty: Array
    repetition_penalty: Array
    output_counts: Array
    prompt_ids: Array
    allowed_ids: Array
    listed_ids: Array
    listed_biases: Array
    num_listed: Array


@dataclass(frozen=True)
class SampleParams:
    """Sampling parameters by state slot, written on admission; all arrays [slots].

    temperature, top_p, min_p fp32; top_k int32 (0 = off); seed uint64; num_logprobs int32 (-1 =
    none). `adjustments` may be None where no row has a feature.
    """

    temperature: Array
    top_p: Array
    min_p: Array
    top_k: Array
    seed: Array
    num_logprobs: Array
    adjustments: LogitAdjustments | None = None


@dataclass(frozen=True)
class SampleBatch:
    """Rows of the logits buffer to sample, B of them.

    Row i samples the token at sequence position `positions[i]` (the draw's counter) for
    `state_slots[i]`. `vocab_limit`: ids from there on are padding rows of the embedding.
    `features[i]`: bits as above; None: no row has any. `mask_rows[i]`: the row of `masks` (uint32
    [M, ceil(vocab / 32)], bit id % 32 of word id // 32 set: the id may be sampled) that holds for
    row i, or -1; both are None where no row is masked.
    """

    rows: Array
    state_slots: Array
    positions: Array
    params: SampleParams
    vocab_limit: int
    features: Array | None = None
    mask_rows: Array | None = None
    masks: Array | None = None


@dataclass(frozen=True)
class SlotFeatures:
    """What `SampleBatch.features` follow from, on the host, by state slot; both int32 [slots].

    `features` without STOPS_FORBIDDEN, which rows below `first_stop_positions` have.
    """

    features: npt.NDArray[np.int32]
    first_stop_positions: npt.NDArray[np.int32]


def mask_words(vocab: int) -> int:
    """32-bit words of a row that has a bit for each id."""
    return -(-vocab // 32)


@dataclass(frozen=True)
class TableUpdates:
    """Block-table entries that change: flat index slot * max_blocks + index, and the block."""

    indices: Array
    blocks: Array


def decode_columns(decodes: tuple[ScheduledDecode, ...], num_rows: int) -> npt.NDArray[np.int32]:
    """input_ids, positions and state_slots [3, num_rows]; rows past the decodes are padding, whose
    slot is -1."""
    columns = np.zeros((3, num_rows), np.int32)
    columns[2, len(decodes) :] = -1
    columns[0, : len(decodes)] = [d.input_id for d in decodes]
    columns[1, : len(decodes)] = [d.position for d in decodes]
    columns[2, : len(decodes)] = [d.state_slot for d in decodes]
    return columns


def build_decode_batch(decodes: tuple[ScheduledDecode, ...], upload: Upload) -> DecodeBatch:
    input_ids, positions, state_slots = map(upload, decode_columns(decodes, len(decodes)))
    slot_mapping = upload(np.zeros(len(decodes), np.int32))
    return DecodeBatch(input_ids, positions, state_slots, slot_mapping)


def build_prefill_batch(
    prefills: tuple[ScheduledPrefill, ...], block_size: int, upload: Upload
) -> PrefillBatch:
    cu_seqlens = [0]
    input_ids: list[int] = []
    positions, slot_mapping = [], []
    for p in prefills:
        cu_seqlens.append(cu_seqlens[-1] + p.end - p.start)
        input_ids.extend(p.sequence.prompt_ids[p.start : p.end])
        span = np.arange(p.start, p.end, dtype=np.int32)
        first_block = p.start // block_size
        blocks = np.array(p.sequence.block_table[first_block : -(-p.end // block_size)], np.int32)
        positions.append(span)
        slot_mapping.append(
            blocks[span // block_size - first_block] * block_size + span % block_size
        )
    starts = tuple(p.start for p in prefills)
    slots = tuple(p.state_slot for p in prefills)
    initial_slots = tuple(_initial_slot(p) for p in prefills)
    snapshots = tuple(p.snapshots for p in prefills)
    pairs = np.array([pair for own in snapshots for pair in own], np.int32).reshape(-1, 2)
    logits_rows = [end - 1 for p, end in zip(prefills, cu_seqlens[1:], strict=True) if p.sample]
    return PrefillBatch(
        input_ids=upload(np.array(input_ids, np.int32)),
        positions=upload(np.concatenate(positions)),
        slot_mapping=upload(np.concatenate(slot_mapping)),
        cu_seqlens=upload(np.array(cu_seqlens, np.int32)),
        start_positions=upload(np.array(starts, np.int32)),
        state_slots=upload(np.array(slots, np.int32)),
        initial_slots=upload(np.array(initial_slots, np.int32)),
        snapshot_starts=upload(np.cumsum([0, *map(len, snapshots)], dtype=np.int32)),
        snapshot_positions=upload(pairs[:, 0].copy()),
        snapshot_slots=upload(pairs[:, 1].copy()),
        logits_rows=upload(np.array(logits_rows, np.int32)),
        host_cu_seqlens=tuple(cu_seqlens),
        host_start_positions=starts,
        host_state_slots=slots,
        host_initial_slots=initial_slots,
        host_snapshots=snapshots,
    )


def _initial_slot(prefill: ScheduledPrefill) -> int:
    if prefill.initial_slot is not None:
        return prefill.initial_slot
    return prefill.state_slot if prefill.start > 0 else -1


def sample_columns(
    batch: ScheduledBatch, num_rows: int, slots: SlotFeatures
) -> npt.NDArray[np.int32]:
    """rows, state_slots, positions and features [4, num_rows] in the order of `batch.sampled`;
    rows past those are padding: -1."""
    rows = [row for row, d in enumerate(batch.decodes) if d.sample]
    decodes = [batch.decodes[row] for row in rows]
    ends = [p for p in batch.prefills if p.sample]
    rows += range(len(batch.decodes), len(batch.decodes) + len(ends))
    columns = np.full((4, num_rows), -1, np.int32)
    if rows:
        row_ids, state_slots, positions, features = columns[:, : len(rows)]
        row_ids[:] = rows
        state_slots[:] = [d.state_slot for d in decodes] + [p.state_slot for p in ends]
        positions[:] = [d.position + 1 for d in decodes] + [p.end for p in ends]
        forbidden = positions < slots.first_stop_positions[state_slots]
        features[...] = slots.features[state_slots] | STOPS_FORBIDDEN * forbidden
    return columns


def build_table_updates(
    updates: tuple[BlockUpdate, ...], max_blocks: int, upload: Upload
) -> TableUpdates | None:
    if not updates:
        return None
    indices = [u.state_slot * max_blocks + u.index for u in updates]
    return TableUpdates(
        upload(np.array(indices, np.int32)), upload(np.array([u.block for u in updates], np.int32))
    )
