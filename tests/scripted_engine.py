"""ScriptedEngine: stands in for LLMEngine where a test needs an engine that is slow, stuck or
broken at a known moment. Prompts say what happens, and outputs follow from the prompt.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from deltaserve.engine.capacity import Capacity
from deltaserve.engine.config import ConfigError
from deltaserve.engine.grammar import Grammar, GrammarError
from deltaserve.engine.grammar_state import CompiledFuture
from deltaserve.engine.llm_engine import Submitted
from deltaserve.engine.messages import EngineStats
from deltaserve.engine.progress import Progress
from deltaserve.engine.request_queue import QueueFullError, RequestTooLargeError
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.scheduled_batch import ScheduledBatch, ScheduledPrefill
from deltaserve.engine.sequence import FinishReason, RequestOutput, Sequence, TokenLogprobs

from .tiny_checkpoint import IM_END_ID, IM_START_ID

logger = logging.getLogger(__name__)

# First prompt id: what the first step of it does. ENDLESS is in prefill for ever.
HANG, CRASH, ROW_ERROR, ENDLESS = 1, 2, 3, 4
VOCAB = 256
PROMPT_LOGPROB = TokenLogprobs(-0.5, (1, 2), (-0.1, -0.2))


def output_id(prompt_ids: Seq[int], n: int) -> int:
    """The n-th output token: a printable ASCII byte of the tests' tokenizer."""
    return 33 + (prompt_ids[-1] + n) % 90


@dataclass(frozen=True)
class Script:
    """`step_s`: how long the pretended device takes. `load_s`: the same for each of two stages.
    `obedient`: whether prompts say what happens. `recite`: the output is the prompt up to its first
    <|im_start|>, so many tokens a step, and ends as a model's does."""

    step_s: float = 0.0
    load_s: float = 0.0
    load_error: str | None = None
    config_error: str | None = None
    max_running: int = 4
    max_queue: int = 4
    max_model_len: int = 512
    device_name: str = "cpu"
    obedient: bool = True
    recite: int = 0


@dataclass
class ScriptedEngine:
    script: Script
    running: dict[str, Sequence] = field(default_factory=dict)
    waiting: dict[str, Sequence] = field(default_factory=dict)
    recent_batches: list[ScheduledBatch] = field(default_factory=list)
    num_steps: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    vocab_limit: int = VOCAB
    submitted: Submitted = field(default_factory=Submitted)

    @property
    def capacity(self) -> Capacity:
        return Capacity(
            num_blocks=64,
            block_size=64,
            num_state_slots=self.script.max_running,
            max_model_len=self.script.max_model_len,
            max_num_batched_tokens=512,
            prefill_chunk=64,
            max_queue=self.script.max_queue,
        )

    @property
    def device_name(self) -> str:
        return self.script.device_name

    @property
    def open_sequences(self) -> list[Sequence]:
        return [*self.running.values(), *self.waiting.values()]

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add_request(
        self,
        request_id: str,
        prompt_ids: Seq[int],
        params: SamplingParams,
        compiled: CompiledFuture | None = None,
    ) -> None:
        total = len(prompt_ids) + params.max_tokens
        if total > self.script.max_model_len:
            raise RequestTooLargeError(f"{total} tokens, limit {self.script.max_model_len}")
        if compiled is not None:
            compiled.result()
        num_free_slots = self.script.max_running - len(self.running)
        if len(self.waiting) >= self.script.max_queue + num_free_slots:
            raise QueueFullError(f"{len(self.waiting)} requests are waiting")
        self.waiting[request_id] = Sequence(request_id, tuple(prompt_ids), params)

    def compile(self, grammar: Grammar) -> CompiledFuture:
        compiled = CompiledFuture()
        compiled.set_exception(GrammarError(grammar, "no script has a grammar"))
        return compiled

    def abort(self, request_id: str) -> None:
        self.running.pop(request_id, None)
        self.waiting.pop(request_id, None)

    def step(self) -> list[RequestOutput]:
        time.sleep(self.script.step_s)
        self.num_steps += 1
        admitted = []
        outputs = [
            self._advance(sequence)
            for sequence in list(self.running.values())
            if self._command(sequence) != ENDLESS
        ]
        while self.waiting and len(self.running) < self.script.max_running:
            sequence = self.waiting.pop(next(iter(self.waiting)))
            self.running[sequence.request_id] = sequence
            self.num_prompt_tokens += len(sequence.prompt_ids)
            self._note(sequence)
            admitted.append(sequence)
        self.submitted = Submitted(
            tuple(sequence.request_id for sequence in admitted),
            sum(sequence.num_prompt_tokens for sequence in admitted),
        )
        return outputs

    def _command(self, sequence: Sequence) -> int | None:
        return sequence.prompt_ids[0] if self.script.obedient else None

    def _note(self, sequence: Sequence) -> None:
        prefill = ScheduledPrefill(sequence, 0, 0, len(sequence.prompt_ids), True)
        self.recent_batches = [*self.recent_batches, ScheduledBatch((), (prefill,), (), ())][-8:]

    def _advance(self, sequence: Sequence) -> RequestOutput:
        command = self._command(sequence)
        if command == HANG:
            threading.Event().wait()
        if command == CRASH:
            raise RuntimeError("scripted failure")
        if command == ROW_ERROR:
            del self.running[sequence.request_id]
            return RequestOutput(
                sequence.request_id, (), (), FinishReason.ERROR, error="logits are not finite"
            )
        if self.script.recite:
            return self._recite(sequence)
        prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        if sequence.params.prompt_logprobs is not None and not sequence.output_ids:
            prompt_logprobs = (PROMPT_LOGPROB,) * (sequence.num_prompt_tokens - 1)
        if sequence.params.max_tokens == 0:
            del self.running[sequence.request_id]
            return RequestOutput(
                sequence.request_id, (), (), FinishReason.LENGTH, prompt_logprobs=prompt_logprobs
            )
        sequence.output_ids.append(output_id(sequence.prompt_ids, len(sequence.output_ids)))
        self.num_generation_tokens += 1
        done = len(sequence.output_ids) == sequence.params.max_tokens
        if done:
            del self.running[sequence.request_id]
        logprobs = (
            () if sequence.params.logprobs is None else (TokenLogprobs(-0.5, (1, 2), (-0.1, -0.2)),)
        )
        return RequestOutput(
            sequence.request_id,
            (sequence.output_ids[-1],),
            logprobs,
            FinishReason.LENGTH if done else None,
            prompt_logprobs=prompt_logprobs,
        )

    def _recite(self, sequence: Sequence) -> RequestOutput:
        text = sequence.prompt_ids[: sequence.prompt_ids.index(IM_START_ID)]
        at, most = len(sequence.output_ids), sequence.params.max_tokens
        ids = (*text, IM_END_ID)[at : min(at + self.script.recite, most)]
        sequence.output_ids += ids
        self.num_generation_tokens += len(ids)
        ended = ids[-1] == IM_END_ID
        reason = FinishReason.STOP if ended else None
        if not ended and len(sequence.output_ids) == most:
            reason = FinishReason.LENGTH
        if reason is not None:
            del self.running[sequence.request_id]
        one = TokenLogprobs(-0.5, (65, 0xE2), (-0.1, -0.2))
        return RequestOutput(
            sequence.request_id,
            ids,
            () if sequence.params.logprobs is None else (one,) * len(ids),
            reason,
            stop_id=IM_END_ID if ended else None,
        )

    def stats(self) -> EngineStats:
        running = len(self.running)
        return EngineStats(
            num_finished={},
            num_running=running,
            num_waiting=len(self.waiting),
            num_blocks=64,
            num_free_blocks=64 - running,
            num_state_slots=self.script.max_running,
            num_free_state_slots=self.script.max_running - running,
            num_steps=self.num_steps,
            num_preemptions=0,
            num_prompt_tokens=self.num_prompt_tokens,
            num_generation_tokens=self.num_generation_tokens,
        )

    def set_profiling(self, on: bool) -> None:
        logger.info("profiling %s", on)

    def close(self) -> None:
        pass


def build_scripted_engine(script: Script, progress: Progress) -> ScriptedEngine:
    for stage in ("reading", "planning"):
        progress(stage, 0, 2)
        time.sleep(script.load_s)
    if script.load_error is not None:
        raise ValueError(script.load_error)
    if script.config_error is not None:
        raise ConfigError(script.config_error)
    return ScriptedEngine(script)
