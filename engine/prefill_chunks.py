"""How many prompt tokens a step may take, and where the chunks of a prompt end."""

from __future__ import annotations

from .capacity import Capacity
from .sequence import Sequence

DECODES_PER_CHUNK = 6  # as often as there are so many, another chunk
PROMPTS_PER_DECODE = 2
CHUNK_ALIGNMENT = 64  # the delta rule and attention tile the prompt on this absolute grid


def prefill_budget(capacity: Capacity, num_decodes: int, num_prompts: int) -> int:
    """The most prompt tokens of a step beside so many decode rows, while so many prompts wait or
    are part done.

    A chunk is how long a token of a running sequence may be held up. Several in one step are
    cheaper by the token, so the budget grows where that costs few or helps many: with the rows,
    since a step of many takes long by itself, and with the prompts for each row.
    """
    if num_decodes == 0:
        return capacity.max_num_batched_tokens
    by_rows = num_decodes // DECODES_PER_CHUNK
    by_prompts = num_prompts // (PROMPTS_PER_DECODE * num_decodes)
    chunks = max(1, by_rows, by_prompts)
    return min(capacity.max_num_batched_tokens, chunks * capacity.prefill_chunk)


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
