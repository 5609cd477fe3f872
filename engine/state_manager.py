"""StateManager: which recurrent-state slots are free. Owns ids only; the arrays are in `cache`."""

from __future__ import annotations


class StateManager:
    """Slot ids 0 .. num_slots-1, one for each running sequence. The slot freed last is taken
    first, so that a lightly loaded engine keeps touching the same few."""

    def __init__(self, num_slots: int) -> None:
        assert num_slots > 0
        self._free = list(range(num_slots - 1, -1, -1))
        self._used = [False] * num_slots

    @property
    def num_slots(self) -> int:
        return len(self._used)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._used) - len(self._free)

    def allocate(self) -> int:
        """Takes a slot; the caller has checked `num_free`."""
        assert self._free, "no state slot is free"
        slot = self._free.pop()
        self._used[slot] = True
        return slot

    def free(self, slot: int) -> None:
        assert self._used[slot], f"state slot {slot} is free already"
        self._used[slot] = False
        self._free.append(slot)
