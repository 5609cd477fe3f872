"""Which ids may come next in a sequence, decided on the host from the ids read so far.

A sequence may have bad words and a grammar; their masks intersect. The mask needs the token
before, so a step with such a row is sampled only after the step before it has been read; see
`LLMEngine.step`. What does not depend on the tokens before (single banned ids, allowed ids) is no
constraint: `logit_adjustments` has it on the device.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import cached_property
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from .forward_batch import mask_words
from .grammar_state import GrammarState, MaskFiller
from .sequence import Sequence, SequenceStatus

ALL = np.uint32(0xFFFFFFFF)
MAX_MASK_THREADS = 8


class BadWords:
    """Sequences of ids that must not come up: bans the last id of each that is there but for it.

    Only output ids count. A word of one id is always banned.
    """

    def __init__(self, words: Iterable[tuple[int, ...]]) -> None:
        self._words = [(list(word[:-1]), word[-1]) for word in words]

    def banned(self, output_ids: SequenceOf[int]) -> list[int]:
        """Ids that must not follow `output_ids`."""
        size = len(output_ids)
        return [
            last
            for before, last in self._words
            if len(before) <= size and list(output_ids[size - len(before) :]) == before
        ]


def is_constrained(seq: Sequence) -> bool:
    params = seq.params
    return params.grammar is not None or any(len(word) > 1 for word in params.bad_words)


@dataclass(frozen=True)
class StepMasks:
    """As in `SampleBatch`, on the host."""

    mask_rows: npt.NDArray[np.int32]
    masks: npt.NDArray[np.uint32]


class _Constraint:
    """Of one sequence."""

    def __init__(self, seq: Sequence) -> None:
        self.bad_words = BadWords(word for word in seq.params.bad_words if len(word) > 1)
        self.grammar: GrammarState | None = None
        if seq.params.grammar is not None:
            assert seq.compiled_grammar is not None
            self.grammar = GrammarState(seq.compiled_grammar, seq.params.grammar.start_after)


class Constraints:
    """The constraints of the sequences that have one, each kept as long as its sequence."""

    def __init__(self, vocab_size: int) -> None:
        self._num_words = mask_words(vocab_size)
        self._of: WeakKeyDictionary[Sequence, _Constraint] = WeakKeyDictionary()

    def masks(self, sampled: SequenceOf[Sequence]) -> StepMasks:
        """For a step's sampled rows, when all ids of earlier steps have been read. Sequences that
        have ended meanwhile are free."""
        mask_rows = np.full(len(sampled), -1, np.int32)
        grammars: list[tuple[GrammarState, int]] = []
        banned: list[list[int]] = []
        for row, seq in enumerate(sampled):
            if seq.status is SequenceStatus.FINISHED or not is_constrained(seq):
                continue
            assert len(seq.output_ids) == seq.num_sampled - 1
            constraint = self._constraint(seq)
            ids = constraint.bad_words.banned(seq.output_ids)
            if constraint.grammar is not None:
                constraint.grammar.advance(seq.output_ids)
                grammars.append((constraint.grammar, len(banned)))
            elif not ids:
                continue
            mask_rows[row] = len(banned)
            banned.append(ids)
        masks = np.full((len(banned), self._num_words), ALL)
        if grammars:
            self._filler.fill(grammars, masks)
        for mask, ids in zip(masks, banned, strict=True):
            for token_id in ids:
                mask[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        return StepMasks(mask_rows, masks)

    @cached_property
    def _filler(self) -> MaskFiller:
        return MaskFiller(min(MAX_MASK_THREADS, len(os.sched_getaffinity(0))))

    def _constraint(self, seq: Sequence) -> _Constraint:
        if seq not in self._of:
            self._of[seq] = _Constraint(seq)
        return self._of[seq]
