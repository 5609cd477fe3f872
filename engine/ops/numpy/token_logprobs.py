"""Log-probabilities of given ids: the reference of `Ops.token_logprobs`."""

from __future__ import annotations

import numpy as np

from ...sampling_params import MAX_LOGPROBS
from .sampling import F32, I32, log_normalizer, top_ids


def token_logprobs(
    logits: F32,
    target_ids: I32,
    vocab_limit: int,
    num_top: int,
    out_logprobs: F32,
    out_ranks: I32,
    out_top_ids: I32,
    out_top_logprobs: F32,
) -> None:
    """A log-probability has the bits that `sampling.sample` gives the same id of the same row."""
    for i, target in enumerate(target_ids.tolist()):
        row = logits[i, :vocab_limit]
        if not np.isfinite(row).all():
            out_ranks[i] = -1
            continue
        largest, log_total = log_normalizer(row)
        out_logprobs[i] = (row[target] - largest) - log_total
        out_ranks[i] = np.count_nonzero(row >= row[target])
        if num_top > 0:
            top = top_ids(row, MAX_LOGPROBS)
            out_top_ids[i, : len(top)] = top
            out_top_logprobs[i, : len(top)] = (row[top] - largest) - log_total
            out_top_ids[i, len(top) :] = -1
            out_top_logprobs[i, len(top) :] = -np.inf
