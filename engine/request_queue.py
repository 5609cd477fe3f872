"""RequestQueue: sequences without a state slot, and which requests are refused at the door.

Holds no counts of free blocks or slots: when the head may run is the scheduler's business.
"""

from __future__ import annotations

from collections import OrderedDict

from .capacity import Capacity
from .sequence import Sequence


class QueueFullError(Exception):
    """`Capacity.max_queue` requests wait already (HTTP 429)."""


class RequestTooLargeError(ValueError):
    """The request could never run, however long it waited (HTTP 400)."""


class RequestQueue:
    """First in, first out; a preempted sequence comes back to the front. All O(1)."""

    def __init__(self, capacity: Capacity) -> None:
        self._capacity = capacity
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def head(self) -> Sequence:
        return next(iter(self._waiting.values()))

    def add(self, seq: Sequence) -> None:
        """Raises RequestTooLargeError or QueueFullError, and then leaves the queue as it was."""
        check_fits(seq, self._capacity)
        if len(self._waiting) >= self._capacity.max_queue:
            raise QueueFullError(
                f"{len(self._waiting)} requests are waiting and the limit is "
                f"{self._capacity.max_queue}; try again later"
            )
        self._waiting[seq.request_id] = seq

    def push_front(self, seq: Sequence) -> None:
        self._waiting[seq.request_id] = seq
        self._waiting.move_to_end(seq.request_id, last=False)

    def pop_head(self) -> Sequence:
        return self._waiting.popitem(last=False)[1]

    def remove(self, seq: Sequence) -> None:
        del self._waiting[seq.request_id]


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
    num_blocks = capacity.blocks_for(num_prompt + max_tokens - 1)
    if num_blocks > capacity.num_blocks:
        raise RequestTooLargeError(
            f"the prompt has {num_prompt} tokens and max_tokens is {max_tokens}: together they "
            f"need {num_blocks} cache blocks of {capacity.block_size} tokens and there are "
            f"{capacity.num_blocks}"
        )
