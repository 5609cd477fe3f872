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

DIGITS = 41 * 32
"""Bins of a row's histogram of masses."""

MAX_VOCAB = SEGMENTS << 13
"""What a block's 32-bit sums over a segment have room for."""

MASS_BLOCKS = 32
"""Blocks for each segment that add up masses; a block's rows, where it has several, are looked at
at once, so that it ends at once where none asks for sums."""


class SampleWork:
    """What the kernels of a call hand on, for so many rows. `empty(shape, dtype)` allocates."""

    def __init__(self, empty: Any, max_rows: int) -> None:
        self.group_keys = empty((max_rows, GROUPS), "uint64")
        self.raw_keys = empty((max_rows, GROUPS), "uint64")
        self.segment_masses = empty((max_rows, SEGMENTS), "uint64")
        self.raw_masses = empty((max_rows, SEGMENTS), "uint64")
        self.histograms = empty((max_rows, DIGITS), "uint64")


def sample(
    kernels: Kernels,
    logits: Array,
    batch: SampleBatch,
    next_ids: Array,
    out_ids: Array,
    out_logprobs: Array,
    out_top_ids: Array,
    out_top_logprobs: Array,
    work: SampleWork,
) -> None:
    rows, vocab, params = len(batch.rows), logits.shape[1], batch.params
    assert rows <= len(work.group_keys) and vocab <= MAX_VOCAB
    adjustments = _adjustment_arguments(batch, vocab)
    kernels.launch(
        "sample_segments",
        (SEGMENTS, rows, 1),
        256,
        logits,
        batch.rows,
        batch.state_slots,
        *adjustments,
        params.num_logprobs,
        work.group_keys,
        work.raw_keys,
        work.histograms,
        vocab,
        batch.vocab_limit,
    )
    kernels.launch(
        "sample_masses",
        (SEGMENTS, min(rows, MASS_BLOCKS), 1),
        256,
        logits,
        batch.rows,
        batch.state_slots,
        *adjustments,
        params.temperature,
        params.top_p,
        params.min_p,
        params.top_k,
        params.num_logprobs,
        work.group_keys,
        work.raw_keys,
        work.segment_masses,
        work.raw_masses,
        work.histograms,
        vocab,
        batch.vocab_limit,
        rows,
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
        work.group_keys,
        work.raw_keys,
        work.segment_masses,
        work.raw_masses,
        work.histograms,
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
