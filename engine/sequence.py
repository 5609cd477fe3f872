"""Sequence: the engine's side of one request, and what a step says about it.

    prompt_ids (P)                      output_ids
    |----------------------------------|-------------|....|
    0            num_computed_tokens ^               ^    ^
                                       P + len(output_ids)|
                                              P + num_sampled (issued, maybe not read yet)

`num_computed_tokens` counts tokens whose KV and state are written by steps already scheduled; it
restarts at 0 on preemption and `num_sampled` does not, which is all that replay needs: a token
whose successor is already sampled is run with sampling off.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from .sampling_params import SamplingParams


class SequenceStatus(enum.Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(eq=False)
class Sequence:
    """Owned by the scheduler; only it changes these fields."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    stop_ids: frozenset[int] = frozenset()
    seed: int = 0
    arrival_time: float = 0.0
    status: SequenceStatus = SequenceStatus.WAITING
    output_ids: list[int] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_sampled: int = 0
    block_table: list[int] = field(default_factory=list)
    state_slot: int = -1
    num_preemptions: int = 0
    num_prompt_logprobs: int = 0  # issued, maybe not read yet; a replay does not repeat them
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # read, not yet handed out
    block_hashes: tuple[bytes, ...] | None = None  # of the prompt; these three: the prefix cache's
    snapshot_positions: list[int] = field(default_factory=list)
    num_cached_tokens: int = 0  # found when it was first admitted
    num_counted_tokens: int = 0  # of the prompt, in statistics; the engine's
    compiled_grammar: Any = None  # a grammar_state.CompiledGrammar, of `params.grammar`

    @cached_property
    def ending_ids(self) -> frozenset[int]:
        """Ids that end the sequence: the model's, unless they are to be ignored, and its own. What
        follows a grammar ends with the model's in any case: nothing can come after it."""
        own = frozenset(self.params.stop_token_ids)
        ignored = self.params.ignore_eos and self.params.grammar is None
        return own if ignored else self.stop_ids | own

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_ids)

    @property
    def num_tokens(self) -> int:
        """Prompt plus output tokens the host has read."""
        return len(self.prompt_ids) + len(self.output_ids)

    @property
    def in_prefill(self) -> bool:
        return self.num_computed_tokens < len(self.prompt_ids)


class TokenLogprobs(NamedTuple):
    """Log-probabilities of one token given those before it, of the raw logits.

    `rank`: how many ids are at least as likely, itself included (1: the likeliest); of prompt
    tokens only.
    """

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]
    rank: int | None = None


class RequestOutput(NamedTuple):
    """What one step adds to one request. (A named tuple, as ScheduledDecode is, for speed.)

    `finish_reason` is set on the last one; `stop_id` is the end id that stopped it, if one did.
    The end id itself is in `token_ids` (it counts as usage and is not text).

    `error_param`: what the request's sender calls the field at fault, where an error is theirs.
    The first one of a request also has what is known of its prompt: `prompt_logprobs`, if asked
    for, of the prompt's tokens from the second on; and `num_cached_tokens`, how many of the
    prompt's tokens were found in the prefix cache.
    """

    request_id: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_id: int | None = None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    error_param: str | None = None
