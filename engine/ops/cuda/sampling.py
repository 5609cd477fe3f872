"""Sampling: cuda/sampling.cu."""

from __future__ import annotations

from typing import Any

from ...forward_batch import SampleBatch
from .kernels import Kernels

Array = Any

SEGMENTS = 32
"""Parts of the vocabulary that are searched side by side."""


def sample(
    kernels: Kernels,
    logits: Array,
    batch: SampleBatch,
    next_ids: Array,
    out_ids: Array,
    out_logprobs: Array,
    out_top_ids: Array,
    out_top_logprobs: Array,
    segment_keys: Array,
) -> None:
    """`segment_keys` uint64 [rows, SEGMENTS] is scratch."""
    rows, vocab, params = len(batch.rows), logits.shape[1], batch.params
    assert params.logit_bias is None and params.penalties is None and params.masks is None
    assert rows <= len(segment_keys)
    kernels.launch(
        "sample_segments",
        (SEGMENTS, rows, 1),
        256,
        logits,
        batch.rows,
        segment_keys,
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
        params.temperature,
        params.top_p,
        params.min_p,
        params.top_k,
        params.seed,
        params.num_logprobs,
        segment_keys,
        next_ids,
        out_ids,
        out_logprobs,
        out_top_ids,
        out_top_logprobs,
        vocab,
        batch.vocab_limit,
    )
