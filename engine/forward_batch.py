"""ScheduledBatch -> the index arrays a forward pass needs.

This module states what each array means; it owns none of the caches. Arrays are int32 unless said.
`Array` is numpy on the CPU and cupy on CUDA: the host builds numpy arrays, `Device.upload` moves
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Array = Any


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
        where the start is 0 the sequence's conv and recurrent state count as zeros.

    `logits_rows` are the token rows (0..T-1) whose logits are wanted. `host_*` are the same values
    as tuples, for grid sizes and loops on the host.
    """

    input_ids: Array
    positions: Array
    slot_mapping: Array
    cu_seqlens: Array
    start_positions: Array
    state_slots: Array
    logits_rows: Array
    host_cu_seqlens: tuple[int, ...]
    host_start_positions: tuple[int, ...]
    host_state_slots: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.host_cu_seqlens[-1]

    @property
    def num_seqs(self) -> int:
        return len(self.host_start_positions)


@dataclass(frozen=True)
class SampleParams:
    """Sampling parameters by state slot, written on admission; all arrays [slots].

    temperature, top_p, min_p fp32; top_k int32 (0 = off); seed uint64; num_logprobs int32 (-1 =
    none). `logit_bias`, `penalties` and `masks` are None until a request needs them.
    """

    temperature: Array
    top_p: Array
    min_p: Array
    top_k: Array
    seed: Array
    num_logprobs: Array
    logit_bias: Array | None = None
    penalties: Array | None = None
    masks: Array | None = None


@dataclass(frozen=True)
class SampleBatch:
    """Rows of the logits buffer to sample, B of them.

    Row i samples the token at sequence position `positions[i]` (the draw's counter) for
    `state_slots[i]`. `vocab_limit`: ids from there on are padding rows of the embedding.
    """

    rows: Array
    state_slots: Array
    positions: Array
    params: SampleParams
    vocab_limit: int
