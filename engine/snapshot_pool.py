"""SnapshotPool: which snapshot slots hold the state after which prefix. Owns ids only.

A snapshot is a copy of one sequence's recurrent and conv state, in a slot of the arrays that hold
those of the running sequences (see `cache`). It is found by the hash of the prefix's last block.

A step may read a snapshot or write one, but not both in one slot, for it may do so in either order.
So a slot that has a part in the step being made is pinned until `end_step`; later steps run after
it, and may do with the slot what they like.
"""

from __future__ import annotations

from collections import OrderedDict


class SnapshotPool:
    """Slot ids first_slot .. first_slot + num_slots - 1."""

    def __init__(self, first_slot: int, num_slots: int) -> None:
        self._free = list(range(first_slot, first_slot + num_slots))[::-1]
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # unused for longest first
        self._pinned: set[int] = set()
        self.num_slots = num_slots
        self.num_evictions = 0

    @property
    def num_used(self) -> int:
        return len(self._slots)

    def __contains__(self, prefix_hash: bytes) -> bool:
        return prefix_hash in self._slots

    def use(self, prefix_hash: bytes) -> int:
        """The slot of a snapshot that the step being made reads."""
        self._slots.move_to_end(prefix_hash)
        slot = self._slots[prefix_hash]
        self._pinned.add(slot)
        return slot

    def allocate(self) -> int | None:
        """A slot for the step being made to write, if need be that of the snapshot unused for
        longest; None if all are pinned. It is the caller's until `put`."""
        slot = self._pop_free()
        if slot is None:
            oldest = next((h for h, s in self._slots.items() if s not in self._pinned), None)
            if oldest is None:
                return None
            slot = self._slots.pop(oldest)
            self.num_evictions += 1
        self._pinned.add(slot)
        return slot

    def put(self, prefix_hash: bytes, slot: int) -> None:
        """The step that writes the slot is made: from the next one on it can be used."""
        assert prefix_hash not in self._slots
        self._slots[prefix_hash] = slot

    def drop(self, prefix_hash: bytes) -> None:
        """Forgets a snapshot, if there is one."""
        slot = self._slots.pop(prefix_hash, None)
        if slot is not None:
            self._free.append(slot)

    def end_step(self) -> None:
        self._pinned.clear()

    def _pop_free(self) -> int | None:
        """A pinned one is free if its snapshot was dropped in this step; it waits for the next."""
        for i in range(len(self._free) - 1, -1, -1):
            if self._free[i] not in self._pinned:
                return self._free.pop(i)
        return None
