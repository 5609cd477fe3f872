"""Log-probabilities of given ids: cuda/token_logprobs.cu."""

from __future__ import annotations

from typing import Any

from ...sampling_params import MAX_LOGPROBS
from .kernels import Kernels

Array = Any

_THREADS = 1024
_MAX_GROUP = 244


def token_logprobs(
    kernels: Kernels,
    logits: Array,
    target_ids: Array,
    vocab_limit: int,
    num_top: int,
    out_logprobs: Array,
    out_ranks: Array,
    out_top_ids: Array,
    out_top_logprobs: Array,
) -> None:
    rows, vocab = logits.shape
    assert vocab_limit <= min(vocab, _THREADS * _MAX_GROUP)
    assert len(target_ids) == rows and out_top_ids.shape[1] == MAX_LOGPROBS
    kernels.launch(
        "token_logprobs",
        (rows, 1, 1),
        _THREADS,
        logits,
        target_ids,
        out_logprobs,
        out_ranks,
        out_top_ids,
        out_top_logprobs,
        vocab,
        vocab_limit,
        num_top,
    )
