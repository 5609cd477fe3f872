"""LLMEngine: requests in, tokens out, one overlapped step at a time, in the caller's thread.

    step():   schedule n+1 -> submit n+1 -> wait for n -> update the scheduler with n's tokens

so that while the device computes, the host prepares what follows and reads what went before; at
most one submitted step is unread when `step` returns. It knows neither text nor processes: see
`output_processor` and `core_process`.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from .capacity import Capacity
from .config import EngineConfig, ModelConfig
from .device import Device
from .loading import Progress, load_model
from .model_runner import LogitsHook, SubmittedStep
from .sampling_params import SamplingParams
from .scheduled_batch import ScheduledBatch
from .scheduler import Scheduler
from .sequence import RequestOutput, Sequence
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class EngineStats:
    """Gauges of now and counters since start."""

    num_running: int
    num_waiting: int
    num_blocks: int
    num_free_blocks: int
    num_state_slots: int
    num_free_state_slots: int
    num_steps: int
    num_preemptions: int
    num_prompt_tokens: int
    num_generation_tokens: int


class LLMEngine:
    """A loaded model that serves requests.

    `progress(stage, done, total)` is called while loading. `tokenizer` saves reading it again:
    only its end ids and highest id are used. `device` and `logits_hook` are for tests.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        tokenizer: Tokenizer | None = None,
        device: Device | None = None,
        logits_hook: LogitsHook | None = None,
    ) -> None: ...

    @property
    def capacity(self) -> Capacity: ...

    @property
    def model_config(self) -> ModelConfig: ...

    @property
    def vocab_limit(self) -> int:
        """Prompt ids must be below it, sampled ids are."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to schedule or to read."""

    def add_request(
        self, request_id: str, prompt_ids: Seq[int], params: SamplingParams
    ) -> None:
        """Queues a request. ValueError for what can never run, the scheduler's error for a full
        queue. A seed is drawn when the parameters have none."""

    def abort(self, request_id: str) -> None:
        """Forgets a request in whatever state; unknown or finished ids are no error."""

    def step(self) -> list[RequestOutput]:
        """Runs one step ahead and returns what the step before it gave: [] when nothing was in
        flight. Raises what the device raised; the engine is of no use after that."""

    def stats(self) -> EngineStats: ...

    def close(self) -> None:
        """Waits for the step in flight and frees the device."""
