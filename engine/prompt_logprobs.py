"""Log-probabilities of prompt tokens, taken while the prompt is prefilled.

The logits of a whole prompt would take more memory than its KV cache. So the hidden states go
through lm_head in slices of as many rows as the logits buffer has, before the pass writes the
logits it samples from, and each slice is reduced to what was asked for and copied to the host. A
row's result does not depend on its slice, for neither lm_head's nor the reduction's does.

The scheduler says which positions are wanted (`ScheduledPrefill.logprob_positions`); `step_outputs`
hands the results out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .device import Device
from .ops.base import Ops
from .sampling_params import MAX_LOGPROBS
from .scheduled_batch import ScheduledPrefill
from .sequence import TokenLogprobs

Array = Any
ComputeLogits = Callable[[Array, Array], None]
"""(token rows of the pass int32 [n], logits fp32 [n, vocab] to write)."""


class HostPromptLogprobs:
    """Host arrays that one step's results are copied to."""

    def __init__(self, device: Device, num_tokens: int) -> None:
        self.logprobs = device.host_empty((num_tokens,), "float32")
        self.ranks = device.host_empty((num_tokens,), "int32")
        self.top_ids = device.host_empty((num_tokens, MAX_LOGPROBS), "int32")
        self.top_logprobs = device.host_empty((num_tokens, MAX_LOGPROBS), "float32")

    def read(
        self, prefills: tuple[ScheduledPrefill, ...], vocab_limit: int
    ) -> list[list[TokenLogprobs] | None]:
        """After the step: of each prefill that wants some, in order; None where a row of logits was
        not finite."""
        results: list[list[TokenLogprobs] | None] = []
        first = 0
        for p in prefills:
            if p.logprob_positions:
                rows = slice(first, first + len(p.logprob_positions))
                first = rows.stop
                results.append(self._entries(rows, min(_num_top(p), vocab_limit)))
        return results

    def _entries(self, rows: slice, num_top: int) -> list[TokenLogprobs] | None:
        ranks = self.ranks[rows]
        if (ranks < 0).any():
            return None
        top_ids = map(tuple, self.top_ids[rows, :num_top].tolist())
        top_logprobs = map(tuple, self.top_logprobs[rows, :num_top].tolist())
        columns = self.logprobs[rows].tolist(), top_ids, top_logprobs, ranks.tolist()
        return list(map(TokenLogprobs, *columns))


@dataclass(frozen=True)
class PromptRows:
    """What a step wants: the token rows of its prefill pass, and the id that follows each.

    Both int32 [N]. `num_top`: the most alternatives that any of them wants.
    """

    rows: Array
    target_ids: Array
    num_top: int


def build_prompt_rows(
    prefills: tuple[ScheduledPrefill, ...], upload: Callable[[Any], Array]
) -> PromptRows | None:
    """None when no log-probability is wanted."""
    rows, target_ids = [], list[int]()
    num_top = first = 0
    for p in prefills:
        wanted = p.logprob_positions
        if wanted:
            rows.append(np.arange(wanted.start, wanted.stop, dtype=np.int32) + (first - p.start))
            target_ids += p.sequence.prompt_ids[wanted.start + 1 : wanted.stop + 1]
            num_top = max(num_top, _num_top(p))
        first += p.end - p.start
    if not rows:
        return None
    return PromptRows(upload(np.concatenate(rows)), upload(np.array(target_ids, np.int32)), num_top)


class PromptLogprobs:
    """Borrows the step's buffers before it samples: logits fp32 [rows, vocab], and the arrays that
    `Ops.sample` writes log-probabilities to, of as many rows."""

    def __init__(
        self,
        device: Device,
        ops: Ops,
        vocab_limit: int,
        logits: Array,
        logprobs: Array,
        top_ids: Array,
        top_logprobs: Array,
    ) -> None:
        self._device = device
        self._ops = ops
        self._vocab_limit = vocab_limit
        self._logits = logits
        self._ranks = device.empty((len(logits),), "int32")
        self._out = logprobs, self._ranks, top_ids, top_logprobs

    def run(
        self, wanted: PromptRows, compute_logits: ComputeLogits, to: HostPromptLogprobs
    ) -> None:
        """Within the step's work, behind the layers of its prefill pass."""
        download = self._device.download
        for start in range(0, len(wanted.rows), len(self._logits)):
            rows = wanted.rows[start : start + len(self._logits)]
            n, end = len(rows), start + len(rows)
            logits = self._logits[:n]
            compute_logits(rows, logits)
            out = [array[:n] for array in self._out]
            self._ops.token_logprobs(
                logits, wanted.target_ids[start:end], self._vocab_limit, wanted.num_top, *out
            )
            download(out[0], to.logprobs[start:end])
            download(out[1], to.ranks[start:end])
            if wanted.num_top > 0:
                download(out[2], to.top_ids[start:end])
                download(out[3], to.top_logprobs[start:end])


def _num_top(prefill: ScheduledPrefill) -> int:
    return prefill.sequence.params.prompt_logprobs or 0
