"""RequestQueue: sequences without a state slot, and which requests are refused at the door.

Holds no counts of free blocks or slots: when the head may run is the scheduler's business.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict

from .capacity import Capacity
from .sequence import Sequence


class QueueFullError(Exception):
    """`Capacity.max_queue` requests wait already, beyond those with a slot to go to (HTTP 429)."""


class RequestTooLargeError(ValueError):
    """The request could never run, however long it waited (HTTP 400)."""


class RequestQueue:
    """Preempted sequences first, the last one preempted at the head; then new ones, those of lower
    `params.priority` first and equal ones in order of arrival."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._preempted: OrderedDict[str, Sequence] = OrderedDict()
        self._new: dict[str, int] = {}  # request_id -> number of arrival
        self._heap: list[tuple[int, int, Sequence]] = []  # also what has been removed since
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return len(self._preempted) + len(self._new)

    @property
    def head(self) -> Sequence:
        if self._preempted:
            return next(iter(self._preempted.values()))
        self._drop_removed()
        return self._heap[0][2]

    def add(self, seq: Sequence, num_free_slots: int = 0) -> None:
        """Raises RequestTooLargeError or QueueFullError, and then leaves the queue as it was.

        Of those that wait, `num_free_slots` are only here until the next step: the limit is on the
        others, so that an idle engine takes a burst of what it can run and `max_queue` more.
        """
        check_fits(seq, self._capacity)
        if len(self) >= self._capacity.max_queue + num_free_slots:
            raise QueueFullError(
                f"{len(self) - num_free_slots} requests are waiting and the limit is "
                f"{self._capacity.max_queue}; try again later"
            )
        number = next(self._arrivals)
        self._new[seq.request_id] = number
        heapq.heappush(self._heap, (seq.params.priority, number, seq))

    def push_front(self, seq: Sequence) -> None:
        self._preempted[seq.request_id] = seq
        self._preempted.move_to_end(seq.request_id, last=False)

    def pop_head(self) -> Sequence:
        seq = self.head
        self.remove(seq)
        return seq

    def remove(self, seq: Sequence) -> None:
        if self._preempted.pop(seq.request_id, None) is None:
            del self._new[seq.request_id]
            self._drop_removed()

    def _drop_removed(self) -> None:
        """Keeps the heap's top, and its size within that of what waits."""
        if len(self._heap) > 2 * len(self._new) + 16:
            self._heap = [e for e in self._heap if self._new.get(e[2].request_id) == e[1]]
            heapq.heapify(self._heap)
        while self._heap and self._new.get(self._heap[0][2].request_id) != self._heap[0][1]:
            heapq.heappop(self._heap)


def check_fits(seq: Sequence, capacity: Capacity) -> None:
    """Raises RequestTooLargeError unless `seq` could run to its last token on an idle engine, and
    ValueError for an empty prompt.

    The last output token is never fed back, so max_tokens - 1 of them need a place in the cache.
    """
    num_prompt, max_tokens = seq.num_prompt_tokens, seq.params.max_tokens
    if num_prompt == 0:
        raise ValueError("the prompt must have at least one token")
    if num_prompt + max_tokens > capacity.max_model_len:
        raise RequestTooLargeError(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}: "
            f"{num_prompt + max_tokens} together, over the context length of "
            f"{capacity.max_model_len} tokens"
        )
    num_blocks = capacity.blocks_for(num_prompt + max(max_tokens - 1, 0))
    if num_blocks > capacity.num_blocks:
        raise RequestTooLargeError(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}: together they "
            f"need {num_blocks} cache blocks of {capacity.block_size} tokens and there are "
            f"{capacity.num_blocks}"
        )
