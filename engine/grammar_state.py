"""How far one sequence has come in its grammar, and which ids may come next.

Advanced by ids that have been read, each once, so that neither overlap nor a replay after
preemption touches it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor, LLMatcher

Mask = npt.NDArray[np.uint32]


@dataclass(frozen=True)
class CompiledGrammar:
    """`matcher` stands at the beginning, for ever: each sequence takes a copy.

    `end_ids` end a sequence; a token of `newline_ids` may come between the reasoning and what
    the grammar rules.
    """

    matcher: LLMatcher
    end_ids: frozenset[int]
    newline_ids: frozenset[int]
    num_bytes: int = 0


CompiledFuture = Future[CompiledGrammar]


class GrammarState:
    """Of one sequence."""

    def __init__(self, compiled: CompiledGrammar, start_after: tuple[int, ...]) -> None:
        self.matcher = compiled.matcher.deep_copy()
        self._compiled = compiled
        self._start_after = list(start_after)
        self._num_read = 0
        self.has_started = not start_after
        self._just_started = False

    def advance(self, output_ids: SequenceOf[int]) -> None:
        """Takes what is new of the output, which grows by some ids from call to call."""
        for count in range(self._num_read + 1, len(output_ids) + 1):
            token_id = output_ids[count - 1]
            if not self.has_started:
                tail = output_ids[max(count - len(self._start_after), 0) : count]
                self.has_started = self._just_started = list(tail) == self._start_after
            elif not (self._just_started and self._is_blank(token_id)):
                self.matcher.consume_token(token_id)
                self._just_started = False
            else:
                self._just_started = False
        self._num_read = len(output_ids)

    def finish(self, mask: Mask) -> None:
        """Adds to `mask` what the matcher does not know; `fill` has written it if it has started.

        A grammar that outgrew its limits leaves no id, which ends the request with an error: the
        library would let it end as if it were complete.
        """
        if not self.has_started:
            _set(mask, self._compiled.end_ids, False)
        elif self.matcher.is_error():
            mask[:] = 0
        elif self._just_started:
            _set(mask, self._compiled.newline_ids, True)

    def _is_blank(self, token_id: int) -> bool:
        """The grammar has the first claim on it."""
        newline = token_id in self._compiled.newline_ids
        return newline and not self.matcher.validate_tokens([token_id])


class MaskFiller:
    """Computes masks of several rows at once, by threads that do not hold the GIL."""

    def __init__(self, num_threads: int) -> None:
        self._executor = LLExecutor(num_threads)

    def fill(self, states: SequenceOf[tuple[GrammarState, int]], masks: Mask) -> None:
        """Writes row i of `masks` [n, words], C-contiguous, for each (state, i)."""
        assert masks.flags.c_contiguous
        started = [(state.matcher, row) for state, row in states if state.has_started]
        num_bytes = masks.shape[1] * masks.itemsize
        if len(started) == 1:
            ((matcher, row),) = started
            matcher.unsafe_compute_mask_ptr(masks[row].ctypes.data, num_bytes)
        elif started:
            address, rows = masks.ctypes.data, masks.shape[0]
            self._executor.unsafe_compute_mask_ptr(started, address, num_bytes, rows)
        for state, row in states:
            state.finish(masks[row])


def _set(mask: Mask, ids: Iterable[int], allowed: bool) -> None:
    for token_id in ids:
        bit = np.uint32(1 << token_id % 32)
        if allowed:
            mask[token_id // 32] |= bit
        else:
            mask[token_id // 32] &= ~bit
