"""LLMEngine: requests in, tokens out, one overlapped step at a time, in the caller's thread.

    step():   schedule n+1 -> submit n+1 -> wait for n -> update the scheduler with n's tokens

so that while the device computes, the host prepares what follows and reads what went before; at
most one submitted step is unread when `step` returns. A step with a row whose next id is chosen by
those before it (`constraints`) is sampled after that update, others at once. It knows neither text
nor processes: see `output_processor` and `core_process`.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

from .capacity import Capacity
from .config import EngineConfig, ModelConfig
from .device import Device
from .grammar import Grammar, GrammarError
from .grammar_state import CompiledFuture, CompiledGrammar
from .grammars import Grammars
from .model_loader import load_model_runner
from .model_runner import LogitsHook
from .progress import Progress
from .sampling_params import SamplingParams
from .scheduled_batch import ScheduledBatch
from .scheduler import Scheduler
from .sequence import RequestOutput, Sequence
from .submitted_step import SubmittedStep
from .tokenizer import Tokenizer

NUM_RECENT_BATCHES = 8


class Submitted(NamedTuple):
    """What a call of `step` gave the device: requests that were in no step before, and the tokens
    of prompts that it computes."""

    first_scheduled: tuple[str, ...] = ()
    num_prompt_tokens: int = 0


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
    num_prompt_tokens: int  # each once, cached or not; replays do not count
    num_generation_tokens: int
    num_snapshots: int
    num_free_snapshots: int
    num_cached_blocks: int  # free ones that hold a cached prefix
    num_prefix_query_tokens: int  # of prompts that were looked up in the prefix cache
    num_prefix_hit_tokens: int
    num_block_evictions: int
    num_snapshot_evictions: int
    host_seconds: float  # of the engine's thread in `step`, waiting for the device apart
    device_busy_seconds: float
    decode_graph_rows: int  # of the last decode pass, padding included; 0 without graphs
    device_idle_seconds: float  # between steps of which the later one was already there to run


class LLMEngine:
    """A loaded model that serves requests.

    `progress(stage, done, total)` is called while loading. `tokenizer` saves reading it again:
    its tokens are used, not its text. `grammars_ahead`: read the vocabulary for grammars while the
    weights load, which the first grammar would have to wait for otherwise, and with it all that
    runs. `device` and `logits_hook` are for tests.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        progress: Progress | None = None,
        tokenizer: Tokenizer | None = None,
        grammars_ahead: bool = False,
        device: Device | None = None,
        logits_hook: LogitsHook | None = None,
    ) -> None:
        tokenizer = tokenizer or Tokenizer(config.model_path)
        model_config = ModelConfig.from_hf(config.model_path)
        self.end_ids = tokenizer.end_ids | frozenset(model_config.eos_token_ids)
        self._grammars = Grammars(tokenizer, self.end_ids, model_config.vocab_size)
        if grammars_ahead:
            self._grammars.load()
        self._runner = load_model_runner(
            config, tokenizer.vocab_limit, progress=progress, device=device, logits_hook=logits_hook
        )
        self.model_config: ModelConfig = self._runner.model_config
        self.capacity: Capacity = self._runner.capacity
        self.vocab_limit: int = self._runner.vocab_limit
        """Prompt ids must be below it; sampled ids are."""
        self.device_name: str = self._runner.device_name
        self._scheduler = Scheduler(self.capacity)
        self._in_flight: tuple[ScheduledBatch, SubmittedStep] | None = None
        self._open: dict[str, Sequence] = {}
        self._recent: deque[ScheduledBatch] = deque(maxlen=NUM_RECENT_BATCHES)
        self._random = random.SystemRandom() if config.seed is None else random.Random(config.seed)
        self.submitted = Submitted()
        """By the last call of `step`."""
        self._num_steps = 0
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._host_seconds = 0.0
        self._device_busy_seconds = 0.0
        self._device_idle_seconds = 0.0
        self._follows_a_step = False  # whether the step read next was submitted behind another

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to schedule or to read."""
        return self._in_flight is not None or self._scheduler.has_work

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting

    @property
    def open_sequences(self) -> list[Sequence]:
        """Requests that have not ended, oldest first."""
        return list(self._open.values())

    @property
    def recent_batches(self) -> list[ScheduledBatch]:
        """The last steps, oldest first, for a crash dump."""
        return list(self._recent)

    def add_request(
        self,
        request_id: str,
        prompt_ids: SequenceOf[int],
        params: SamplingParams,
        compiled: CompiledFuture | None = None,
    ) -> None:
        """Queues a request; a seed is drawn when the parameters have none.

        `compiled` is its grammar, from `compile`; without, it is waited for here. ValueError for
        what can never run (RequestTooLargeError where it does not fit, GrammarError), and
        QueueFullError.
        """
        low, high = min(prompt_ids, default=0), max(prompt_ids, default=0)
        if low < 0 or high >= self.vocab_limit:
            raise ValueError(
                f"the prompt has token id {low if low < 0 else high}; the model's ids are 0 to "
                f"{self.vocab_limit - 1}"
            )
        params.check_token_ids(self.vocab_limit)
        compiled_grammar = None
        if params.grammar is not None:
            compiled_grammar = self._wait_for(params.grammar, compiled)
        sequence = Sequence(
            request_id=request_id,
            prompt_ids=tuple(prompt_ids),
            params=params,
            stop_ids=self.end_ids,
            seed=self._random.getrandbits(64) if params.seed is None else params.seed,
            arrival_time=time.monotonic(),
            compiled_grammar=compiled_grammar,
        )
        self._scheduler.add(sequence)
        self._open[request_id] = sequence

    def compile(self, grammar: Grammar) -> CompiledFuture:
        """Begins to compile a grammar beside this thread; equal ones are compiled once."""
        return self._grammars.compile(grammar)

    def _wait_for(self, grammar: Grammar, compiled: CompiledFuture | None) -> CompiledGrammar:
        try:
            return (compiled or self.compile(grammar)).result()
        except GrammarError as error:  # of an equal one, whose sender may call it otherwise
            raise GrammarError(grammar, error.problem) from None

    def abort(self, request_id: str) -> None:
        """Forgets a request in whatever state, with no output; ended or unknown ones are no error.

        Its blocks and slot are free at once: whoever gets them runs after the step in flight.
        """
        self._scheduler.abort(request_id)
        self._open.pop(request_id, None)

    def step(self) -> list[RequestOutput]:
        """Submits a step and returns the outputs of the one before it, [] if none was in flight.

        Raises what the device raised; the engine is of no use after that.
        """
        begin = time.perf_counter()
        previous, self._in_flight = self._in_flight, None
        batch = self._scheduler.schedule()
        if not batch.is_empty:
            self._recent.append(batch)
            self._in_flight = (batch, self._runner.submit(batch))
            self._num_steps += 1
            self._count_prompt_tokens(batch)
        self.submitted = Submitted(
            tuple(s.request_id for s in batch.admitted if not s.num_preemptions),
            sum(prefill.end - prefill.start for prefill in batch.prefills),
        )
        submitted = time.perf_counter()
        self._host_seconds += submitted - begin
        if previous is None:
            self._follows_a_step = False
            self._sample_in_flight()
            return []
        read_batch, step = previous
        tokens = step.wait()
        waited = time.perf_counter()
        self._count_device_time(step)
        outputs = self._scheduler.update(
            read_batch, tokens.token_ids, tokens.logprobs, tokens.prompt_logprobs
        )
        self._sample_in_flight()
        for output in outputs:
            self._num_generation_tokens += len(output.token_ids)
            if output.finish_reason is not None:
                del self._open[output.request_id]
        self._host_seconds += time.perf_counter() - waited
        return outputs

    def _sample_in_flight(self) -> None:
        """Where sampling waits for the ids that have now been read, it no longer does."""
        if self._in_flight is not None:
            self._in_flight[1].sample()

    def _count_prompt_tokens(self, batch: ScheduledBatch) -> None:
        """Those that no step had reached, be it by finding them in the prefix cache."""
        for prefill in batch.prefills:
            seq = prefill.sequence
            self._num_prompt_tokens += max(0, prefill.end - seq.num_counted_tokens)
            seq.num_counted_tokens = max(prefill.end, seq.num_counted_tokens)

    def _count_device_time(self, step: SubmittedStep) -> None:
        timing = step.timing
        self._device_busy_seconds += timing.busy
        if self._follows_a_step:
            self._device_idle_seconds += timing.idle
        self._follows_a_step = self._in_flight is not None

    def stats(self) -> EngineStats:
        now, capacity = self._scheduler.stats, self.capacity
        cache = self._scheduler.prefix_cache
        return EngineStats(
            num_running=now.num_running,
            num_waiting=now.num_waiting,
            num_blocks=capacity.num_blocks,
            num_free_blocks=capacity.num_blocks - now.num_blocks_used,
            num_state_slots=capacity.num_state_slots,
            num_free_state_slots=capacity.num_state_slots - now.num_slots_used,
            num_steps=self._num_steps,
            num_preemptions=now.num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            num_snapshots=capacity.num_snapshots,
            num_free_snapshots=capacity.num_snapshots - cache.snapshots.num_used,
            num_cached_blocks=cache.blocks.num_cached,
            num_prefix_query_tokens=cache.stats.num_query_tokens,
            num_prefix_hit_tokens=cache.stats.num_hit_tokens,
            num_block_evictions=cache.blocks.num_evictions,
            num_snapshot_evictions=cache.snapshots.num_evictions,
            host_seconds=self._host_seconds,
            device_busy_seconds=self._device_busy_seconds,
            decode_graph_rows=self._runner.decode_graph_rows,
            device_idle_seconds=self._device_idle_seconds,
        )

    def set_profiling(self, on: bool) -> None:
        """Begins or ends what an attached profiler records; no effect on the CPU."""
        self._runner.set_profiling(on)

    def close(self) -> None:
        """Waits for the step in flight and frees the device. Idempotent."""
        self._in_flight = None
        self._grammars.close()
        self._runner.close()
