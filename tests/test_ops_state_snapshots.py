"""Where the convolution and the delta rule take a sequence's state from and leave it: its own slot,
another one, and snapshots in mid-call. All of it exact on the NumPy backend."""

from __future__ import annotations

import numpy as np
import pytest

from deltaserve.engine.forward_batch import PrefillBatch, build_prefill_batch
from deltaserve.engine.ops.numpy import NumpyOps
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.scheduled_batch import ScheduledPrefill
from deltaserve.engine.sequence import Sequence

from .batches import prefill_batch

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 1, 2, 8, 6
CHANNELS = 2 * KEY_HEADS * KEY_DIM + VALUE_HEADS * VALUE_DIM
SLOTS = 6
LENGTH = 300
State = tuple[np.ndarray, np.ndarray]


class Prompt:
    """A prompt's projections, and both ops over spans of it."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        width = CHANNELS + VALUE_HEADS * (VALUE_DIM + 2)
        self.qkvzba = rng.standard_normal((LENGTH, width), dtype=np.float32)
        self.weight = rng.standard_normal((CHANNELS, 4), dtype=np.float32)
        self.gates = rng.standard_normal((2, VALUE_HEADS), dtype=np.float32)

    def run(self, batch: PrefillBatch, state: State) -> np.ndarray:
        """Both ops' outputs side by side; updates (conv_state, recurrent_state)."""
        ops, rows = NumpyOps(), self.qkvzba[batch.positions]
        qkv = np.full((len(rows), CHANNELS), np.nan, np.float32)
        out = np.full((len(rows), VALUE_HEADS * VALUE_DIM), np.nan, np.float32)
        ops.causal_conv1d(rows, self.weight, batch, state[0], qkv)
        ops.delta_rule_prefill(qkv, rows, *self.gates, batch, state[1], out)
        return np.concatenate([qkv, out], axis=1)


def empty_state() -> State:
    return (
        np.full((SLOTS, 4, CHANNELS), np.nan, np.float32),
        np.full((SLOTS, VALUE_HEADS, KEY_DIM, VALUE_DIM), np.nan, np.float32),
    )


def assert_same_slot(found: State, slot: int, expected: State, expected_slot: int) -> None:
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine[slot], other[expected_slot])
        assert np.isfinite(mine[slot]).all()


@pytest.mark.parametrize("start", [0, 62, 64, 130])
def test_a_snapshot_is_the_state_of_a_prompt_cut_there(start: int) -> None:
    """Start 62: rows of the first snapshot's convolution lie before the call."""
    prompt, before = Prompt(seed=1), empty_state()
    if start:
        prompt.run(prefill_batch([(0, start)], [0]), before)
    whole = tuple(array.copy() for array in before)
    positions = [p for p in (64, 128, 256) if p > start]
    snapshots = list(zip(positions, (5, 2, 4), strict=False))
    batch = prefill_batch([(start, LENGTH)], [0], snapshots=[snapshots])
    out = prompt.run(batch, whole)
    for position, slot in snapshots:
        cut = tuple(array.copy() for array in before)
        head = prompt.run(prefill_batch([(start, position)], [0]), cut)
        np.testing.assert_array_equal(head, out[: position - start])
        assert_same_slot(whole, slot, cut, 0)
    untouched = [s for s in range(1, SLOTS) if s not in dict(snapshots).values()]
    assert all(np.isnan(array[untouched]).all() for array in whole)


@pytest.mark.parametrize("end", [193, 194, 256, LENGTH])
def test_starting_from_a_snapshot_is_going_on(end: int) -> None:
    """End 193: three of the four rows of the new slot's convolution come from the snapshot."""
    prompt, state = Prompt(seed=2), empty_state()
    batch = prefill_batch([(0, end)], [1], snapshots=[[(192, 5)]])
    out = prompt.run(batch, state)
    snapshot = tuple(array[5].copy() for array in state)
    tail = prompt.run(prefill_batch([(192, end)], [3], initial_slots=[5]), state)
    np.testing.assert_array_equal(tail, out[192:])
    assert_same_slot(state, 3, state, 1)
    for array, kept in zip(state, snapshot, strict=True):
        np.testing.assert_array_equal(array[5], kept)


def test_sequences_share_a_snapshot_and_write_their_own() -> None:
    """Two go on from one snapshot while a third starts from zeros; each has a snapshot at the end
    of its call."""
    prompt, state = Prompt(seed=3), empty_state()
    prompt.run(prefill_batch([(0, 64)], [0], snapshots=[[(64, 5)]]), state)
    spans = [(64, 128), (0, 64), (64, 192)]
    batch = prefill_batch(spans, [1, 2, 0], [5, -1, 5], [[(128, 3)], [], [(192, 4)]])
    prompt.run(batch, state)
    assert_same_slot(state, 2, state, 5)
    assert_same_slot(state, 3, state, 1)
    assert_same_slot(state, 4, state, 0)
    alone = empty_state()
    prompt.run(prefill_batch([(0, 192)], [0]), alone)
    assert_same_slot(state, 0, alone, 0)


def test_batch_from_what_was_scheduled() -> None:
    """Without a word about state a prompt starts from zeros and goes on in its own slot."""

    def scheduled(slot: int, start: int, end: int, **state: object) -> ScheduledPrefill:
        sequence = Sequence("", (1,) * 200, SamplingParams(), block_table=[0, 1, 2, 3])
        return ScheduledPrefill(sequence, slot, start, end, False, **state)

    prefills = (
        scheduled(3, 0, 64),
        scheduled(1, 64, 200, snapshots=((128, 7), (192, 9))),
        scheduled(2, 128, 192, initial_slot=8, snapshots=((192, 6),)),
        scheduled(0, 64, 128, initial_slot=-1),
    )
    batch = build_prefill_batch(prefills, 64, lambda array: array)
    assert batch.host_initial_slots == (-1, 1, 8, -1)
    assert batch.initial_slots.tolist() == [-1, 1, 8, -1]
    assert batch.host_snapshots == ((), ((128, 7), (192, 9)), ((192, 6),), ())
    assert batch.snapshot_starts.tolist() == [0, 0, 2, 3, 3]
    assert batch.snapshot_positions.tolist() == [128, 192, 192]
    assert batch.snapshot_slots.tolist() == [7, 9, 6]
    arrays = (batch.initial_slots, batch.snapshot_starts, batch.snapshot_positions)
    assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in arrays)
