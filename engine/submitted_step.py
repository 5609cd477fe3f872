"""A step from its submission to its results: the host arrays they arrive in, and what they say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .device import Device, Pending, StepTiming
from .prompt_logprobs import HostPromptLogprobs
from .sampling_params import MAX_LOGPROBS
from .scheduled_batch import ScheduledBatch
from .sequence import TokenLogprobs


class HostOutputs:
    """Host arrays that one step's results are copied to."""

    def __init__(self, device: Device, rows: int, num_prompt_tokens: int) -> None:
        self.prompt = HostPromptLogprobs(device, num_prompt_tokens)
        self.ids = device.host_empty((rows,), "int32")
        self.logprobs = device.host_empty((rows,), "float32")
        self.top_ids = device.host_empty((rows, MAX_LOGPROBS), "int32")
        self.top_logprobs = device.host_empty((rows, MAX_LOGPROBS), "float32")


@dataclass(frozen=True)
class SampledTokens:
    """What a step sampled, in the order of `ScheduledBatch.sampled`. Ids below 0: failed rows."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    prompt_logprobs: list[list[TokenLogprobs] | None]
    """Of each prefill with `logprob_positions`; None where logits were not finite."""


class SubmittedStep:
    """A step on its way through the device. `launch_sample` puts its sampling on the way, where
    that has not been done: a row of it needs the ids of the step before."""

    def __init__(
        self,
        pending: Pending,
        batch: ScheduledBatch,
        outputs: HostOutputs,
        vocab_limit: int,
        launch_sample: Callable[[], Pending] | None = None,
    ) -> None:
        self._pending = [pending]
        self._launch_sample = launch_sample
        self._prefills = batch.prefills
        self._sampled = batch.sampled
        self._outputs = outputs
        self._vocab_limit = vocab_limit

    @property
    def timing(self) -> StepTiming:
        """After `wait`. The wait for the ids of the step before counts as idle."""
        timings = [pending.timing for pending in self._pending]
        return StepTiming(sum(t.busy for t in timings), sum(t.idle for t in timings))

    def sample(self) -> None:
        """Launches the sampling if it has not been. To be called when the scheduler has the ids of
        the step before, and before the next step is submitted."""
        if self._launch_sample is not None:
            self._pending.append(self._launch_sample())
            self._launch_sample = None

    def wait(self) -> SampledTokens:
        """Blocks until the step is done. To be called before the step after next is submitted."""
        assert self._launch_sample is None
        self._pending[-1].wait()
        token_ids = self._outputs.ids[: len(self._sampled)].tolist()
        logprobs = [
            self._token_logprobs(row, sequence.params.logprobs, token_ids[row])
            for row, sequence in enumerate(self._sampled)
        ]
        prompt_logprobs = self._outputs.prompt.read(self._prefills, self._vocab_limit)
        return SampledTokens(token_ids, logprobs, prompt_logprobs)

    def _token_logprobs(self, row: int, count: int | None, token_id: int) -> TokenLogprobs | None:
        if count is None or token_id < 0:
            return None
        out = self._outputs
        top_ids = out.top_ids[row, :count].tolist()
        if -1 in top_ids:  # fewer ids than alternatives asked for
            top_ids = top_ids[: top_ids.index(-1)]
        top_logprobs = out.top_logprobs[row, : len(top_ids)].tolist()
        return TokenLogprobs(float(out.logprobs[row]), tuple(top_ids), tuple(top_logprobs))
