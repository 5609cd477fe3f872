"""What a step's results mean for its sequences: their tokens, their ends, and the outputs of both.

Frees nothing: an output with a `finish_reason` tells the scheduler to.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf

from .scheduled_batch import ScheduledBatch
from .sequence import FinishReason, RequestOutput, Sequence, SequenceStatus, TokenLogprobs

_NOTHING_ALLOWED = -2
"""What `Ops.sample` gives in place of an id where none may be sampled; -1 for the other."""
_NOT_FINITE = "the logits were not finite"


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
            yield seq, _failed(seq, _NOT_FINITE)
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
        return _nothing_allowed(seq) if token_id == _NOTHING_ALLOWED else _failed(seq, _NOT_FINITE)
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


def _failed(seq: Sequence, error: str, param: str | None = None) -> RequestOutput:
    return RequestOutput(
        seq.request_id, (), finish_reason=FinishReason.ERROR, error=error, error_param=param
    )


def _nothing_allowed(seq: Sequence) -> RequestOutput:
    """The fault is the request's: of all its fields that forbid ids now, the first one's."""
    params = seq.params
    fields = [] if params.grammar is None else [params.grammar.field]
    fields += ["allowed_token_ids"] if params.allowed_token_ids is not None else []
    fields += ["bad_words"] if params.bad_words else []
    fields += ["min_tokens"] if len(seq.output_ids) < params.min_tokens else []
    if not fields:
        return _failed(seq, "no token may be sampled")
    error = f"{fields[0]}: leaves no token that may be sampled"
    if len(fields) > 1:
        error += f", together with {' and '.join(fields[1:])}"
    return _failed(seq, error, fields[0])


def _take_prompt_logprobs(seq: Sequence) -> tuple[TokenLogprobs, ...]:
    entries = tuple(seq.prompt_logprobs)
    seq.prompt_logprobs.clear()
    return entries
