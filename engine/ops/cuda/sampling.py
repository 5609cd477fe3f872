"""Sampling: cuda/sampling.cu."""

from __future__ import annotations

from typing import Any

from ...forward_batch import SampleBatch, mask_words
from .kernels import Kernels

Array = Any

SEGMENTS = 32
"""Parts of the vocabulary that are searched side by side."""

GROUPS = 256
"""Parts of it whose largest logit is handed on, one for each warp of a segment's block."""


def sample(
    kernels: Kernels,
    logits: Array,
    batch: SampleBatch,
    next_ids: Array,
    out_ids: Array,
    out_logprobs: Array,
    out_top_ids: Array,
    out_top_logprobs: Array,
    group_keys: Array,
) -> None:
    """`group_keys` uint64 [rows, GROUPS] is scratch."""
    rows, vocab, params = len(batch.rows), logits.shape[1], batch.params
    assert rows <= len(group_keys)
    adjustments = _adjustment_arguments(batch, vocab)
    kernels.launch(
        "sample_segments",
        (SEGMENTS, rows, 1),
        256,
        logits,
        batch.rows,
        batch.state_slots,
        *adjustments,
        group_keys,
        vocab,
        batch.vocab_limit,
    )
    kernels.launch(
        "sample",
        (rows, 1, 1),
        1024,
        logits,
        batch.rows,
        batch.state_slots,
        batch.positions,
        *adjustments,
        params.temperature,
        params.top_p,
        params.min_p,
        params.top_k,
        params.seed,
        params.num_logprobs,
        group_keys,
        next_ids,
        out_ids,
        out_logprobs,
        out_top_ids,
        out_top_logprobs,
        vocab,
        batch.vocab_limit,
    )


def _adjustment_arguments(batch: SampleBatch, vocab: int) -> tuple[Any, ...]:
    """The kernels' parameters from `features` to `max_listed`; None is a null pointer."""
    state, words = batch.params.adjustments, mask_words(vocab)
    assert (batch.mask_rows is None) == (batch.masks is None)
    assert batch.masks is None or batch.masks.shape[1] == words
    masks = (batch.mask_rows, batch.masks)
    if state is None:
        assert batch.features is None
        return (None, *masks, *[None] * 9, 0)
    assert state.output_counts.shape[1] == -(-vocab // 2)
    assert state.prompt_ids.shape[1] == state.allowed_ids.shape[1] == words
    return (
        batch.features,
        *masks,
        state.presence_penalty,
        state.frequency_penalty,
        state.repetition_penalty,
        state.output_counts,
        state.prompt_ids,
        state.allowed_ids,
        state.listed_ids,
        state.listed_biases,
        state.num_listed,
        state.listed_ids.shape[1],
    )
