"""ScheduledBatch: what one step runs, in host numbers only. Made by the scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from .sequence import Sequence


class ScheduledDecode(NamedTuple):
    """Feeds one generated token at `position`. (A named tuple: a step makes hundreds of them, and
    a frozen dataclass takes over twice as long.)

    `input_id` -1: the host has not read it yet, the device has. `sample`: False in replay, where
    the next token is already known.
    """

    sequence: Sequence
    state_slot: int
    position: int
    input_id: int
    sample: bool


@dataclass(frozen=True)
class ScheduledPrefill:
    """Runs prompt tokens start .. end of a sequence; `sample` if this ends the prompt and its
    first output token is not known yet.

    `initial_slot`: the slot whose state the tokens before `start` left, -1 for none; None is the
    rule without prefix caching: the sequence's own where start > 0. `snapshots`: (position, slot)
    pairs, positions ascending multiples of 64 with start < position <= end: the state after that
    many tokens is written to that slot too. A slot that a step reads as another sequence's initial
    state, or writes as a snapshot, has no other part in the step. `logprob_positions`: of which the
    log-probability of the prompt's next token is wanted.
    """

    sequence: Sequence
    state_slot: int
    start: int
    end: int
    sample: bool
    initial_slot: int | None = None
    snapshots: tuple[tuple[int, int], ...] = ()
    logprob_positions: range = range(0)

    @property
    def ends_sequence(self) -> bool:
        """Whether this is the last that is run of a sequence without output tokens."""
        return self.sequence.params.max_tokens == 0 and self.end == len(self.sequence.prompt_ids)


@dataclass(frozen=True)
class BlockUpdate:
    """Entry `index` of the block table of `state_slot` becomes `block` in this step."""

    state_slot: int
    index: int
    block: int


@dataclass(frozen=True)
class ScheduledBatch:
    """Decodes first. `admitted`: sequences that got their slot in this step (their sampling
    parameters are written by slot). Sampled rows are decodes then prefills, in order, those with
    `sample` set."""

    decodes: tuple[ScheduledDecode, ...]
    prefills: tuple[ScheduledPrefill, ...]
    block_updates: tuple[BlockUpdate, ...]
    admitted: tuple[Sequence, ...]

    @property
    def is_empty(self) -> bool:
        return not self.decodes and not self.prefills

    @property
    def num_tokens(self) -> int:
        return len(self.decodes) + sum(p.end - p.start for p in self.prefills)

    @cached_property
    def sampled(self) -> tuple[Sequence, ...]:
        """The sequences that get a token from this step, in the order of the sampled rows."""
        return (
            *(row.sequence for row in self.decodes if row.sample),
            *(row.sequence for row in self.prefills if row.sample),
        )
