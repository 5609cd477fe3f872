"""Penalties, biases and forbidden ids of the running sequences -> arrays by state slot.

Owns the arrays of `LogitAdjustments` and says which rows have which features. A part of a slot is
written only for a sequence that has the feature, and read only then, so what an earlier sequence
left in a slot does not matter. Output counts start from the ids of the sequence's earlier life, if
it was preempted; the sampling op counts further ones itself, in the step that samples them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .device import Device, StepInputs
from .forward_batch import (
    ALLOWED_IDS,
    LISTED_IDS,
    PENALTIES,
    LogitAdjustments,
    SlotFeatures,
    mask_words,
)
from .ops.base import Ops
from .sampling_params import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS
from .sequence import Sequence

Array = Any
Allocate = Callable[[tuple[int, ...], Any], Array]

MAX_END_IDS = 128
"""Of a model."""

MAX_LISTED = MAX_LOGIT_BIAS + MAX_BAD_WORDS + MAX_STOP_TOKEN_IDS + MAX_END_IDS
MAX_COUNT = 0xFFFF


def allocate_adjustments(num_slots: int, vocab_size: int, zeros: Allocate) -> LogitAdjustments:
    words = mask_words(vocab_size)
    return LogitAdjustments(
        presence_penalty=zeros((num_slots,), "float32"),
        frequency_penalty=zeros((num_slots,), "float32"),
        repetition_penalty=zeros((num_slots,), "float32"),
        output_counts=zeros((num_slots, -(-vocab_size // 2)), "uint32"),
        prompt_ids=zeros((num_slots, words), "uint32"),
        allowed_ids=zeros((num_slots, words), "uint32"),
        listed_ids=zeros((num_slots, MAX_LISTED), "int32"),
        listed_biases=zeros((num_slots, MAX_LISTED), "float32"),
        num_listed=zeros((num_slots,), "int32"),
    )


@dataclass(frozen=True)
class AdjustmentUpdate:
    """`rows`: (array, first row, host rows). `state_slots` and `values`, [B]: the arrays that have
    one number a slot, by name."""

    rows: list[tuple[Array, int, npt.NDArray[Any]]]
    state_slots: Array
    values: dict[str, Array]


class AdjustmentState:
    """`prepare` runs on the host when sequences get their slots, `apply` within the step's work."""

    def __init__(self, num_slots: int, vocab_size: int, device: Device, inputs: StepInputs) -> None:
        self._device = device
        self._inputs = inputs
        self._vocab_size = vocab_size
        self.arrays = allocate_adjustments(num_slots, vocab_size, device.zeros)
        self.features = SlotFeatures(np.zeros(num_slots, np.int32), np.zeros(num_slots, np.int32))

    def prepare(self, admitted: tuple[Sequence, ...]) -> AdjustmentUpdate | None:
        rows: list[tuple[Array, int, npt.NDArray[Any]]] = []
        scalars: list[tuple[int, float, float, float, int]] = []
        for seq in admitted:
            params, slot, before = seq.params, seq.state_slot, len(rows)
            features = num_listed = 0
            if params.uses_penalties:
                features |= PENALTIES
                counts = output_counts(seq.output_ids, self._vocab_size)
                rows.append((self.arrays.output_counts, slot, counts[None]))
                if (
                    params.repetition_penalty != 1.0
                ):  # or else it does not matter which ids they are
                    prompt = id_bits(seq.prompt_ids, self._vocab_size)
                    rows.append((self.arrays.prompt_ids, slot, prompt[None]))
            if params.allowed_token_ids is not None:
                features |= ALLOWED_IDS
                allowed = id_bits(params.allowed_token_ids, self._vocab_size)
                rows.append((self.arrays.allowed_ids, slot, allowed[None]))
            ids, biases = listed_ids(seq)
            if len(ids):
                num_listed, first = len(ids), slot * MAX_LISTED
                rows.append((self.arrays.listed_ids.reshape(-1), first, ids))
                rows.append((self.arrays.listed_biases.reshape(-1), first, biases))
            if params.logit_bias or _banned_ids(seq):
                features |= LISTED_IDS
            self.features.features[slot] = features
            forbidden = params.min_tokens if seq.ending_ids else 0
            self.features.first_stop_positions[slot] = (
                seq.num_prompt_tokens + forbidden if forbidden else 0
            )
            if len(rows) > before:
                penalties = params.presence_penalty, params.frequency_penalty
                scalars.append((slot, *penalties, params.repetition_penalty, num_listed))
        if not scalars:
            return None
        slots, presence, frequency, repetition, lengths = zip(*scalars, strict=True)
        upload = self._inputs.upload
        return AdjustmentUpdate(
            rows,
            upload(np.array(slots, np.int32)),
            {
                "presence_penalty": upload(np.array(presence, np.float32)),
                "frequency_penalty": upload(np.array(frequency, np.float32)),
                "repetition_penalty": upload(np.array(repetition, np.float32)),
                "num_listed": upload(np.array(lengths, np.int32)),
            },
        )

    def apply(self, update: AdjustmentUpdate, ops: Ops) -> None:
        for array, first, host in update.rows:
            self._device.write_rows(host, array, first)
        for name, values in update.values.items():
            ops.scatter(values, update.state_slots, getattr(self.arrays, name))


def adjustment_bytes(num_slots: int, vocab_size: int) -> int:
    """Device memory of the arrays."""
    sizes: list[int] = []
    allocate_adjustments(
        num_slots,
        vocab_size,
        lambda shape, dtype: sizes.append(math.prod(shape) * np.dtype(dtype).itemsize),
    )
    return sum(sizes)


def id_bits(ids: Iterable[int], vocab_size: int) -> npt.NDArray[np.uint32]:
    """A row of `SampleBatch.masks` with the bits of these ids set; each is below `vocab_size`."""
    present = np.zeros(32 * mask_words(vocab_size), np.uint8)
    present[np.fromiter(ids, np.int64)] = 1
    return np.packbits(present, bitorder="little").view("<u4")


def output_counts(output_ids: list[int], vocab_size: int) -> npt.NDArray[np.uint32]:
    """A row of `LogitAdjustments.output_counts`."""
    length = 2 * -(-vocab_size // 2)
    counts = np.bincount(np.array(output_ids, np.int64), minlength=length)
    return np.minimum(counts, MAX_COUNT).astype("<u2").view("<u4")


def listed_ids(seq: Sequence) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
    """Rows of `listed_ids` and `listed_biases`: ids with a bias, words of one id that are banned,
    and with min_tokens those that end the sequence."""
    biases = dict(seq.params.logit_bias) | dict.fromkeys(_banned_ids(seq), -np.inf)
    ends = seq.ending_ids if seq.params.min_tokens else frozenset()
    ids = sorted(biases.keys() | ends)
    assert len(ids) <= MAX_LISTED
    return (
        np.array([2 * token_id + (token_id in ends) for token_id in ids], np.int32),
        np.array([biases.get(token_id, 0.0) for token_id in ids], np.float32),
    )


def _banned_ids(seq: Sequence) -> list[int]:
    return [word[0] for word in seq.params.bad_words if len(word) == 1]
