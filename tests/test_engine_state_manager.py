"""Recurrent-state slots: none is handed out twice, none is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.engine.state_manager import StateManager


def test_takes_the_lowest_free_slot() -> None:
    slots = StateManager(4)
    assert [slots.allocate(), slots.allocate(), slots.allocate()] == [0, 1, 2]
    for slot in (2, 0, 1):
        slots.free(slot)
    assert [slots.allocate(), slots.allocate()] == [0, 1]


def test_allocating_from_an_empty_pool_is_our_bug() -> None:
    slots = StateManager(1)
    slots.allocate()
    with pytest.raises(AssertionError, match="no state slot is free"):
        slots.allocate()


def test_freeing_twice_is_our_bug() -> None:
    slots = StateManager(2)
    slot = slots.allocate()
    slots.free(slot)
    with pytest.raises(AssertionError, match=f"state slot {slot} is free already"):
        slots.free(slot)


@given(num_slots=st.integers(1, 8), steps=st.lists(st.booleans(), max_size=60))
def test_used_and_free_slots_partition_the_pool(num_slots: int, steps: list[bool]) -> None:
    slots = StateManager(num_slots)
    held: list[int] = []
    for allocate in steps:
        if allocate and slots.num_free:
            held.append(slots.allocate())
        elif held:
            slots.free(held.pop(0))
        assert len(set(held)) == len(held) == slots.num_used
        assert slots.num_used + slots.num_free == slots.num_slots == num_slots
    for slot in held:
        slots.free(slot)
    assert sorted(slots.allocate() for _ in range(num_slots)) == list(range(num_slots))
