"""One model on one device: runs scheduled steps and hands back the sampled tokens.

Owns the model, its caches, the logits buffer and the host arrays that results arrive in. Which
sequence runs when is the scheduler's; what an op computes is the backend's.

    submit(batch)   host: index arrays of the step          (engine thread)
                    device: table updates -> decode pass -> prefill pass -> sample -> copy to host
    step.sample()   the last two, if a row is constrained: its mask needs the ids of the step before
    step.wait()     host: ids and log-probabilities as Python values, one step later

The decode pass and sampling are graphs on CUDA (`step_passes`); a prompt's kernels are launched one
by one, for they take longer than their launches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import numpy.typing as npt

from .cache import Cache
from .capacity import Capacity
from .config import ModelConfig
from .constraints import Constraints, is_constrained
from .device import Device, Pending, StepInputs
from .forward_batch import (
    DecodeBatch,
    PrefillBatch,
    SampleBatch,
    build_prefill_batch,
    build_table_updates,
)
from .models.qwen3_5 import Qwen35Model
from .ops.base import Ops
from .prompt_logprobs import PromptLogprobs, PromptRows, build_prompt_rows
from .sampler import Sampler
from .sampling_params import MAX_LOGPROBS, SamplingParams
from .scheduled_batch import ScheduledBatch, ScheduledPrefill
from .sequence import Sequence
from .step_passes import GraphPasses, StepPasses, Work
from .submitted_step import HostOutputs, SubmittedStep

LogitsHook = Callable[[str, int, npt.NDArray[np.float32]], None]
"""(request_id, position of the sampled token, its fp32 logits row); for tests, called in the work
of a step before the row is sampled."""


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
        cuda_graph: bool = True,
        logits_hook: LogitsHook | None = None,
    ) -> None:
        """`cuda_graph` has no effect on a device without graphs."""
        self._model = model
        self._ops = ops
        self._device = device
        self._cache = cache
        self.capacity = capacity
        self.model_config = model_config
        self.vocab_limit = min(vocab_limit, model_config.vocab_size)
        self.device_name = device.name
        self._logits_hook = logits_hook
        rows = capacity.num_state_slots
        inputs_size = step_input_bytes(capacity)
        graphs = device.graphs
        fixed_inputs = None if graphs is None else graphs.step_inputs(inputs_size)
        self._inputs: StepInputs = fixed_inputs or device.step_inputs(inputs_size)
        self._sampler = Sampler(rows, model_config.vocab_size, device, self._inputs)
        self._constraints = Constraints(model_config.vocab_size)
        self._logits = device.empty((rows, model_config.vocab_size), "float32")
        self._out_ids = device.empty((rows,), "int32")
        self._out_logprobs = device.empty((rows,), "float32")
        self._out_top_ids = device.empty((rows, MAX_LOGPROBS), "int32")
        self._out_top_logprobs = device.empty((rows, MAX_LOGPROBS), "float32")
        tokens = capacity.max_num_batched_tokens
        self._host_outputs = (HostOutputs(device, rows, tokens), HostOutputs(device, rows, tokens))
        self._prompt_logprobs = PromptLogprobs(
            device,
            ops,
            self.vocab_limit,
            self._logits,
            self._out_logprobs,
            self._out_top_ids,
            self._out_top_logprobs,
        )
        self._num_submitted = 0
        passes = self._decode, self._sample, self._sampler, self.vocab_limit
        self._passes = (
            StepPasses(self._inputs, *passes)
            if graphs is None or fixed_inputs is None or not cuda_graph
            else GraphPasses(fixed_inputs, *passes, device, graphs, rows)
        )
        if graphs is not None:
            self._load_prefill_kernels()
        device.seal()

    @property
    def decode_graph_rows(self) -> int:
        """Rows of the last decode pass's graph, padding included; 0 without graphs."""
        return self._passes.decode_graph_rows

    def submit(self, batch: ScheduledBatch) -> SubmittedStep:
        """Prepares the step's arrays and submits its work. Does not wait for anything."""
        inputs = self._inputs
        inputs.begin()
        max_blocks = self._cache.block_tables.shape[1]
        table_updates = build_table_updates(batch.block_updates, max_blocks, inputs.upload)
        params_update = self._sampler.prepare(batch.admitted)
        prompt_rows = build_prompt_rows(batch.prefills, inputs.upload)
        # Prompt log-probabilities borrow the logits, so decode rows come after them, and after the
        # prompts' own logits too.
        passes = self._passes
        decode_pass = passes.decode if prompt_rows is None else passes.unpadded_decode
        decode = decode_pass(batch.decodes) if batch.decodes else None
        prefill = (
            build_prefill_batch(batch.prefills, self.capacity.block_size, inputs.upload)
            if batch.prefills
            else None
        )
        outputs = self._host_outputs[self._num_submitted % 2]
        self._num_submitted += 1
        waits = any(map(is_constrained, batch.sampled))
        sample = self._passes.sample(batch) if batch.sampled and not waits else None

        def work() -> None:
            inputs.flush()
            ops, cache = self._ops, self._cache
            if table_updates is not None:
                ops.scatter(table_updates.blocks, table_updates.indices, cache.block_tables)
            if params_update is not None:
                self._sampler.apply(params_update, ops)
            if decode is not None and prompt_rows is None:
                decode()
            if prefill is not None:
                self._prefill(prefill, len(batch.decodes), prompt_rows, outputs)
            if decode is not None and prompt_rows is not None:
                decode()
            if sample is not None:
                self._run_sample(batch, sample, outputs)

        pending = self._device.submit(work)
        launch = partial(self._submit_masked_sample, batch, outputs) if waits else None
        return SubmittedStep(pending, batch, outputs, self.vocab_limit, launch)

    def _submit_masked_sample(self, batch: ScheduledBatch, outputs: HostOutputs) -> Pending:
        masks = self._constraints.masks(batch.sampled)
        sample = self._passes.masked_sample(batch, masks)

        def work() -> None:
            self._inputs.flush()
            self._run_sample(batch, sample, outputs)

        return self._device.submit(work)

    def _run_sample(self, batch: ScheduledBatch, sample: Work, outputs: HostOutputs) -> None:
        if self._logits_hook is not None:
            for request_id, position, row in _sampled_rows(batch):
                self._logits_hook(request_id, position, self._logits[row])
        sample()
        sampled = batch.sampled
        want_logprobs = any(sequence.params.logprobs is not None for sequence in sampled)
        self._download(outputs, len(sampled), want_logprobs)

    def _prefill(
        self,
        batch: PrefillBatch,
        first_row: int,
        prompt_rows: PromptRows | None,
        outputs: HostOutputs,
    ) -> None:
        """The logits go to rows `first_row` and up."""
        before_logits = None
        if prompt_rows is not None:
            run, to_logits = self._prompt_logprobs.run, self._model.prompt_logits
            before_logits = partial(run, prompt_rows, to_logits, outputs.prompt)
        logits = self._logits[first_row : first_row + len(batch.logits_rows)]
        self._model.prefill(batch, logits, before_logits)

    def _load_prefill_kernels(self) -> None:
        """Runs a prompt of each length at which another kernel may be chosen. It writes block 0 and
        slot 0, which nobody reads before writing them."""
        tokens = self.capacity.max_num_batched_tokens
        while tokens:
            prefills = (warm_up_prefill(tokens, self.capacity.block_size),)
            upload = self._device.upload
            batch = build_prefill_batch(prefills, self.capacity.block_size, upload)
            prompt_rows = build_prompt_rows(prefills, upload)
            self._prefill(batch, 0, prompt_rows, self._host_outputs[0])
            tokens //= 2

    def _decode(self, batch: DecodeBatch) -> None:
        self._model.decode(batch, self._logits[: batch.num_rows])

    def _sample(self, batch: SampleBatch) -> None:
        self._ops.sample(
            self._logits,
            batch,
            self._cache.next_ids,
            self._out_ids,
            self._out_logprobs,
            self._out_top_ids,
            self._out_top_logprobs,
        )

    def _download(self, outputs: HostOutputs, n: int, want_logprobs: bool) -> None:
        download = self._device.download
        download(self._out_ids[:n], outputs.ids[:n])
        if want_logprobs:
            download(self._out_logprobs[:n], outputs.logprobs[:n])
            download(self._out_top_ids[:n], outputs.top_ids[:n])
            download(self._out_top_logprobs[:n], outputs.top_logprobs[:n])

    def set_profiling(self, on: bool) -> None:
        self._device.set_profiling(on)

    def close(self) -> None:
        """Waits for submitted work and ends the device's stream."""
        self._device.close()


def _sampled_rows(batch: ScheduledBatch) -> Iterator[tuple[str, int, int]]:
    """(request_id, position of the sampled token, row of the logits) of each sampled row."""
    for row, d in enumerate(batch.decodes):
        if d.sample:
            yield d.sequence.request_id, d.position + 1, row
    ends = (p for p in batch.prefills if p.sample)
    for row, p in enumerate(ends, len(batch.decodes)):
        yield p.sequence.request_id, p.end, row


def warm_up_prefill(tokens: int, block_size: int) -> ScheduledPrefill:
    """A prompt of zeros in slot 0, all of it in block 0, with its last log-probability."""
    table = [0] * -(-tokens // block_size)
    params = SamplingParams(prompt_logprobs=1)
    sequence = Sequence("", (0,) * tokens, params, block_table=table, state_slot=0)
    positions = range(max(tokens - 2, 0), tokens - 1)
    return ScheduledPrefill(sequence, 0, 0, tokens, True, logprob_positions=positions)


def step_input_bytes(capacity: Capacity) -> int:
    """An upper bound of what the index arrays of one step take."""
    rows, tokens = capacity.num_state_slots, capacity.max_num_batched_tokens
    tables = 2 * rows * capacity.blocks_for(capacity.max_model_len)
    by_row = 32 * rows
    return 4 * (tables + by_row + 6 * tokens) + (64 << 10)
