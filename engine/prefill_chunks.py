"""How many prompt tokens a step may take, and where the chunks of a prompt end."""

from __future__ import annotations

from .capacity import Capacity
from .sequence import Sequence

CHUNK_TOKENS_PER_DECODE = 8
CHUNK_ALIGNMENT = 64  # the delta rule and attention tile the prompt on this absolute grid


def prefill_budget(capacity: Capacity, num_decodes: int) -> int:
    """The most prompt tokens of a step beside so many decode rows.

    A step with many rows takes long by itself, and large chunks are cheaper by the token, so the
    budget grows with the rows beyond `prefill_chunk`: a hundred rows are not held up for a chunk
    as often as two are.
    """
    if num_decodes == 0:
        return capacity.max_num_batched_tokens
    by_rows = num_decodes * CHUNK_TOKENS_PER_DECODE // CHUNK_ALIGNMENT * CHUNK_ALIGNMENT
    return min(capacity.max_num_batched_tokens, max(capacity.prefill_chunk, by_rows))


def issue_prompt_logprobs(seq: Sequence, end: int) -> range:
    """The positions before `end` whose next prompt token's log-probability is still to be had."""
    first = seq.num_prompt_logprobs
    if seq.params.prompt_logprobs is not None:
        seq.num_prompt_logprobs = max(first, min(end, len(seq.prompt_ids) - 1))
    return range(first, seq.num_prompt_logprobs)


def chunk_end(start: int, num_prompt: int, limit: int) -> int:
    """Where a chunk from `start` ends if it may not pass `limit`: the end of the prompt, a
    multiple of CHUNK_ALIGNMENT, or `start` if neither can be had."""
    if limit >= num_prompt:
        return num_prompt
    return max(start, limit - limit % CHUNK_ALIGNMENT)
