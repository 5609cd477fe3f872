"""StateManager: which recurrent-state slots are free. Owns ids only; the arrays are in `cache`."""

from __future__ import annotations

import heapq


class StateManager:
    """Slot ids 0 .. num_slots-1, one for each running sequence.

    The lowest free slot is taken first: a lightly loaded engine keeps to a few, and the states of
    one batch lie side by side.
    """

    def __init__(self, num_slots: int) -> None:
        assert num_slots > 0
        self._free = list(range(num_slots))  # a heap
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
        slot = heapq.heappop(self._free)
        self._used[slot] = True
        return slot

    def free(self, slot: int) -> None:
        assert self._used[slot], f"state slot {slot} is free already"
        self._used[slot] = False
        heapq.heappush(self._free, slot)
