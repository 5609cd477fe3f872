"""One model on one device: runs scheduled steps and hands back the sampled tokens.

Owns the model, its caches, the logits buffer and the host arrays that results arrive in. Which
sequence runs when is the scheduler's; what an op computes is the backend's.

    submit(batch)   host: index arrays of the step          (engine thread)
                    device: table updates -> decode pass -> prefill pass -> sample -> copy to host
    step.wait()     host: ids and log-probabilities as Python values, one step later
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .cache import Cache
from .capacity import Capacity
from .config import ModelConfig
from .device import Device, Pending
from .forward_batch import (
    SampleBatch,
    build_decode_batch,
    build_prefill_batch,
    build_sample_batch,
    build_table_updates,
)
from .models.qwen3_5 import Qwen35Model
from .ops.base import Ops
from .sampler import Sampler
from .sampling_params import MAX_LOGPROBS
from .scheduled_batch import ScheduledBatch
from .sequence import Sequence, TokenLogprobs

LogitsHook = Callable[[str, int, npt.NDArray[np.float32]], None]
"""(request_id, position of the sampled token, its fp32 logits row); for tests, called in the work
of a step before the row is sampled."""


class HostOutputs:
    """Host arrays that one step's results are copied to."""

    def __init__(self, rows: int) -> None:
        self.ids = np.empty(rows, np.int32)
        self.logprobs = np.empty(rows, np.float32)
        self.top_ids = np.empty((rows, MAX_LOGPROBS), np.int32)
        self.top_logprobs = np.empty((rows, MAX_LOGPROBS), np.float32)


@dataclass(frozen=True)
class SampledTokens:
    """What a step sampled, in the order of `ScheduledBatch.sampled`. Id -1: a failed row."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]


class SubmittedStep:
    """A step on its way through the device."""

    def __init__(
        self, pending: Pending, sampled: tuple[Sequence, ...], outputs: HostOutputs
    ) -> None:
        self._pending = pending
        self._sampled = sampled
        self._outputs = outputs

    def wait(self) -> SampledTokens:
        """Blocks until the step is done. To be called before the step after next is submitted."""
        self._pending.wait()
        token_ids = self._outputs.ids[: len(self._sampled)].tolist()
        logprobs = [
            self._token_logprobs(row, sequence.params.logprobs, token_ids[row])
            for row, sequence in enumerate(self._sampled)
        ]
        return SampledTokens(token_ids, logprobs)

    def _token_logprobs(self, row: int, count: int | None, token_id: int) -> TokenLogprobs | None:
        if count is None or token_id < 0:
            return None
        out = self._outputs
        top_ids = out.top_ids[row, :count].tolist()
        if -1 in top_ids:  # fewer ids than alternatives asked for
            top_ids = top_ids[: top_ids.index(-1)]
        top_logprobs = out.top_logprobs[row, : len(top_ids)].tolist()
        return TokenLogprobs(float(out.logprobs[row]), tuple(top_ids), tuple(top_logprobs))


class ModelRunner:
    """Runs steps. At most two may be submitted and not waited for."""

    def __init__(
        self,
        model: Qwen35Model,
        ops: Ops,
        device: Device,
        cache: Cache,
        capacity: Capacity,
        model_config: ModelConfig,
        vocab_limit: int,
        logits_hook: LogitsHook | None = None,
    ) -> None:
        self._model = model
        self._ops = ops
        self._device = device
        self._cache = cache
        self.capacity = capacity
        self.model_config = model_config
        self.vocab_limit = min(vocab_limit, model_config.vocab_size)
        self._logits_hook = logits_hook
        self._sampler = Sampler(capacity.num_state_slots, device)
        rows = capacity.num_state_slots
        self._logits = device.empty((rows, model_config.vocab_size), "float32")
        self._out_ids = device.empty((rows,), "int32")
        self._out_logprobs = device.empty((rows,), "float32")
        self._out_top_ids = device.empty((rows, MAX_LOGPROBS), "int32")
        self._out_top_logprobs = device.empty((rows, MAX_LOGPROBS), "float32")
        self._host_outputs = (HostOutputs(rows), HostOutputs(rows))
        self._num_submitted = 0

    def submit(self, batch: ScheduledBatch) -> SubmittedStep:
        """Prepares the step's arrays and submits its work. Does not wait for anything."""
        upload = self._device.upload
        max_blocks = self._cache.block_tables.shape[1]
        table_updates = build_table_updates(batch.block_updates, max_blocks, upload)
        params_update = self._sampler.prepare(batch.admitted)
        decode = build_decode_batch(batch.decodes, upload) if batch.decodes else None
        prefill = (
            build_prefill_batch(batch.prefills, self.capacity.block_size, upload)
            if batch.prefills
            else None
        )
        sample = build_sample_batch(batch, self._sampler.params, self.vocab_limit, upload)
        sampled = batch.sampled
        want_logprobs = any(sequence.params.logprobs is not None for sequence in sampled)
        outputs = self._host_outputs[self._num_submitted % 2]
        self._num_submitted += 1
        hook = self._logits_hook
        hook_rows = _hook_rows(batch) if hook is not None else []

        def work() -> None:
            ops, cache = self._ops, self._cache
            if table_updates is not None:
                ops.scatter(table_updates.blocks, table_updates.indices, cache.block_tables)
            if params_update is not None:
                self._sampler.apply(params_update, ops)
            num_decodes = 0
            if decode is not None:
                num_decodes = decode.num_rows
                self._model.decode(decode, self._logits[:num_decodes])
            if prefill is not None:
                end = num_decodes + len(prefill.logits_rows)
                self._model.prefill(prefill, self._logits[num_decodes:end])
            if sample is None:
                return
            if hook is not None:
                for (request_id, position), row in zip(hook_rows, sample.rows, strict=True):
                    hook(request_id, position, self._logits[row])
            self._sample(sample, outputs, want_logprobs)

        return SubmittedStep(self._device.submit(work), sampled, outputs)

    def _sample(self, sample: SampleBatch, outputs: HostOutputs, want_logprobs: bool) -> None:
        self._ops.sample(
            self._logits,
            sample,
            self._cache.next_ids,
            self._out_ids,
            self._out_logprobs,
            self._out_top_ids,
            self._out_top_logprobs,
        )
        download, n = self._device.download, len(sample.rows)
        download(self._out_ids[:n], outputs.ids[:n])
        if want_logprobs:
            download(self._out_logprobs[:n], outputs.logprobs[:n])
            download(self._out_top_ids[:n], outputs.top_ids[:n])
            download(self._out_top_logprobs[:n], outputs.top_logprobs[:n])

    def close(self) -> None:
        """Waits for submitted work and ends the device's stream."""
        self._device.close()


def _hook_rows(batch: ScheduledBatch) -> list[tuple[str, int]]:
    """(request_id, position) of each sampled row."""
    rows = [(d.sequence.request_id, d.position + 1) for d in batch.decodes if d.sample]
    return rows + [(p.sequence.request_id, p.end) for p in batch.prefills if p.sample]
