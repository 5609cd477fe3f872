"""What a step's results mean for its sequences: their tokens, their ends, and the outputs of both.

Frees nothing: an output with a `finish_reason` tells the scheduler to.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

from .scheduled_batch import ScheduledBatch
from .sequence import FinishReason, RequestOutput, Sequence, SequenceStatus, TokenLogprobs

NO_TOKEN_LEFT = (
    "allowed_token_ids, bad_words, min_tokens and the grammar together leave no token that may be "
    "sampled"
)
"""The one error of a request that is its sender's fault."""
_ROW_ERRORS = {-1: "the logits were not finite", -2: NO_TOKEN_LEFT}
"""By what `Ops.sample` gives in place of an id."""


def step_outputs(
    batch: ScheduledBatch,
    sampled_ids: SequenceOf[int],
    logprobs: SequenceOf[TokenLogprobs | None] | None,
    prompt_logprobs: SequenceOf[SequenceOf[TokenLogprobs] | None],
) -> Iterator[tuple[Sequence, RequestOutput]]:
    """The arguments are those of `Scheduler.update`. Sequences that have ended are passed over, so
    the caller ends one whose output says so before it asks for the next output."""
    wanted = [p.sequence for p in batch.prefills if p.logprob_positions]
    for seq, entries in zip(wanted, prompt_logprobs, strict=True):
        if seq.status is SequenceStatus.FINISHED:
            continue
        if entries is None:
            yield seq, _failed(seq, _ROW_ERRORS[-1])
        else:
            seq.prompt_logprobs.extend(entries)
    for p in batch.prefills:
        if p.ends_sequence and p.sequence.status is not SequenceStatus.FINISHED:
            yield p.sequence, _end_of_prompt(p.sequence)
    sampled = batch.sampled
    assert len(sampled) == len(sampled_ids)
    for row, (seq, token_id) in enumerate(zip(sampled, sampled_ids, strict=True)):
        if seq.status is not SequenceStatus.FINISHED:
            yield seq, _append_token(seq, token_id, logprobs[row] if logprobs else None)


def _append_token(seq: Sequence, token_id: int, logprobs: TokenLogprobs | None) -> RequestOutput:
    if token_id < 0:
        return _failed(seq, _ROW_ERRORS[token_id])
    seq.output_ids.append(token_id)
    finish_reason, stop_id = None, None
    if token_id in seq.ending_ids:
        finish_reason, stop_id = FinishReason.STOP, token_id
    elif len(seq.output_ids) == seq.params.max_tokens:
        finish_reason = FinishReason.LENGTH
    entries = () if logprobs is None else (logprobs,)
    if len(seq.output_ids) > 1:
        return RequestOutput(seq.request_id, (token_id,), entries, finish_reason, stop_id)
    return RequestOutput(
        seq.request_id,
        (token_id,),
        entries,
        finish_reason,
        stop_id,
        prompt_logprobs=_take_prompt_logprobs(seq),
        num_cached_tokens=seq.num_cached_tokens,
    )


def _end_of_prompt(seq: Sequence) -> RequestOutput:
    return RequestOutput(
        seq.request_id,
        (),
        finish_reason=FinishReason.LENGTH,
        prompt_logprobs=_take_prompt_logprobs(seq),
        num_cached_tokens=seq.num_cached_tokens,
    )


def _failed(seq: Sequence, error: str) -> RequestOutput:
    return RequestOutput(seq.request_id, (), finish_reason=FinishReason.ERROR, error=error)


def _take_prompt_logprobs(seq: Sequence) -> tuple[TokenLogprobs, ...]:
    entries = tuple(seq.prompt_logprobs)
    seq.prompt_logprobs.clear()
    return entries
