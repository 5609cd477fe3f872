"""Which ids may come next in a sequence, decided on the host from the ids read so far.

A constraint of one sequence gives a mask for each of its tokens (`bad_words` here). The mask needs
the token before, so a step with such a row is sampled only after the step before it has been read;
see `LLMEngine.step`. What does not depend on the tokens before (single banned ids, allowed ids) is
no constraint: `logit_adjustments` has it on the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from .forward_batch import mask_words
from .sequence import Sequence, SequenceStatus

Mask = npt.NDArray[np.uint32]
ALL = np.uint32(0xFFFFFFFF)


class Constraint(Protocol):
    def mask(self, output_ids: SequenceOf[int]) -> Mask | None:
        """A row of `SampleBatch.masks` for the id after `output_ids`, which are all that came
        before it; None: any id may come. Asked once a token, in order."""


class BadWords:
    """Sequences of ids that must not come up: bans the last id of each that is there but for it.

    Only output ids count. A word of one id is always banned.
    """

    def __init__(self, words: Iterable[tuple[int, ...]], vocab_size: int) -> None:
        self._words = [(list(word[:-1]), word[-1]) for word in words]
        self._num_words = mask_words(vocab_size)

    def mask(self, output_ids: SequenceOf[int]) -> Mask | None:
        size = len(output_ids)
        banned = [
            last
            for before, last in self._words
            if len(before) <= size and list(output_ids[size - len(before) :]) == before
        ]
        if not banned:
            return None
        mask = np.full(self._num_words, ALL)
        for token_id in banned:
            mask[token_id // 32] &= ~np.uint32(1 << token_id % 32)
        return mask


def is_constrained(seq: Sequence) -> bool:
    words = seq.params.bad_words
    return bool(words) and any(len(word) > 1 for word in words)


@dataclass(frozen=True)
class StepMasks:
    """As in `SampleBatch`, on the host."""

    mask_rows: npt.NDArray[np.int32]
    masks: npt.NDArray[np.uint32]


class Constraints:
    """The constraints of the sequences that have one, each kept as long as its sequence."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._of: WeakKeyDictionary[Sequence, Constraint] = WeakKeyDictionary()

    def masks(self, sampled: SequenceOf[Sequence]) -> StepMasks:
        """For a step's sampled rows, when all ids of earlier steps have been read. Sequences that
        have ended meanwhile are free."""
        mask_rows = np.full(len(sampled), -1, np.int32)
        masks: list[Mask] = []
        for row, seq in enumerate(sampled):
            if is_constrained(seq) and seq.status is not SequenceStatus.FINISHED:
                assert len(seq.output_ids) == seq.num_sampled - 1
                mask = self._constraint(seq).mask(seq.output_ids)
                if mask is not None:
                    mask_rows[row] = len(masks)
                    masks.append(mask)
        rows = np.array(masks, np.uint32).reshape(len(masks), mask_words(self._vocab_size))
        return StepMasks(mask_rows, rows)

    def _constraint(self, seq: Sequence) -> Constraint:
        if seq not in self._of:
            words = (word for word in seq.params.bad_words if len(word) > 1)
            self._of[seq] = BadWords(words, self._vocab_size)
        return self._of[seq]
