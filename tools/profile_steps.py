"""Engines of one model whose steps are profiled: decode steps of many rows, and prompts.

A step is what the engine runs, in the scheduler's hands, but one at a time.
"""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deltaserve.engine.config import EngineConfig, ModelConfig
from deltaserve.engine.dummy_weights import dummy_weights
from deltaserve.engine.model_loader import create_backend, create_model_runner
from deltaserve.engine.model_runner import ModelRunner
from deltaserve.engine.scheduled_batch import ScheduledBatch
from deltaserve.engine.scheduler import Scheduler
from deltaserve.engine.submitted_step import SubmittedStep
from deltaserve.engine.tracing import Tracer
from deltaserve.engine.weights import load_weights
from tools.bench_report import number
from tools.engine_timings import random_sequences
from tools.kernel_timers import KernelTime, make_timer
from tools.launch_log import Cell, Launch, LaunchLog, add_graph_times, make_cell
from tools.model_shapes import hf_text_config
from tools.op_costs import Spans

DECODE_STEPS = 12
PREFILL_RUNS = 3
# Card -> TB/s of reads and TFLOP/s of dense bf16 that it sustains.
PEAKS = {"H200": (4.52, 790.0)}

RunStep = Callable[[ScheduledBatch], SubmittedStep]


@dataclass(frozen=True)
class Kind:
    """A decode step of `rows` sequences of `length` tokens, or the prefill of one of `length`."""

    rows: int
    length: int
    decode: bool

    @property
    def name(self) -> str:
        if self.decode:
            return f"decode step, {self.rows} rows, context {self.length}"
        return f"prefill of {self.length} tokens"


class Profile:
    """`model`: the path of a checkpoint or a size, of random weights then."""

    def __init__(
        self,
        model: str,
        *,
        device: str,
        max_rows: int,
        max_len: int,
        peaks: tuple[float | None, float | None],
    ) -> None:
        is_path = Path(model).is_dir()
        self._model = ModelConfig.from_hf(model if is_path else hf_text_config(model))
        max_len = min(max_len, self._model.max_position_embeddings)
        budget = max(-(-max_len // 64) * 64, 8192)
        config = EngineConfig(
            model,
            device=device,  # type: ignore[arg-type]
            max_num_seqs=max_rows,
            max_model_len=max_len,
            max_num_batched_tokens=budget,
            prefill_chunk=budget,
        )
        self._backend = create_backend(config, self._model)
        self._cuda = self._backend.device.graphs is not None
        self._timer = make_timer(sys.modules["cupy"]) if self._cuda else None
        self._log = LaunchLog(self._timer)
        if self._cuda:
            self._log.watch(self._backend.ops._kernels)  # type: ignore[attr-defined]
        backend = self._backend.device, self._backend.act_dtype
        self._weights = (
            load_weights(Path(model), self._model, *backend)
            if is_path
            else dummy_weights(self._model, *backend)
        )
        self._name = model if is_path else f"{model}, random weights"
        self._card = _card() if self._cuda else "CPU"
        known = next((p for card, p in PEAKS.items() if card in self._card), (0.0, 0.0))
        self._peaks = (peaks[0] or known[0]) * 1e12, (peaks[1] or known[1]) * 1e12

    def facts(self) -> dict[str, str]:
        bandwidth, flops = (number(peak / 1e12) if peak else "unknown" for peak in self._peaks)
        return {
            "model": self._name,
            "device": self._card,
            "timer": self._timer.name if self._timer else "host clock",
            "peak TB/s": bandwidth,
            "peak TFLOP/s": flops,
        }

    def measure(self, kinds: Sequence[Kind]) -> list[Cell]:
        cells = self._record(kinds)
        if self._cuda:
            gc.collect()  # the memory of that runner is for the next
            self._time_whole_steps(cells, kinds)
        return cells

    def _record(self, kinds: Sequence[Kind]) -> list[Cell]:
        """Launch by launch."""
        runner = self._runner(cuda_graph=False, tracer=self._log)
        cells = []
        for kind in kinds:
            recorded: list[list[tuple[Launch, float]]] = []

            def record(batch: ScheduledBatch, recorded: list[Any] = recorded) -> SubmittedStep:
                steps: list[SubmittedStep] = []

                def run() -> None:
                    steps.append(runner.submit(batch))
                    steps[0].wait()

                recorded.append(self._log.record(run, _spans(batch)))
                return steps[0]

            _run(runner, kind, record)
            cells.append(make_cell(kind.name, recorded, self._peaks))
        runner.close()
        return cells

    def _time_whole_steps(self, cells: Sequence[Cell], kinds: Sequence[Kind]) -> None:
        """With graphs: first without anything that watches, then kernel by kernel."""
        runner = self._runner(cuda_graph=True, tracer=None)
        for cell, kind in zip(cells, kinds, strict=True):
            busy: list[float] = []

            def run(batch: ScheduledBatch, busy: list[float] = busy) -> SubmittedStep:
                step = runner.submit(batch)
                step.wait()
                busy.append(step.timing.busy)
                return step

            _run(runner, kind, run)
            cell.step_us = 1e6 * statistics.median(busy)
            assert self._timer is not None
            if self._timer.sees_graphs:
                timed: list[list[KernelTime]] = []

                def watch(
                    batch: ScheduledBatch, timed: list[list[KernelTime]] = timed
                ) -> SubmittedStep:
                    timer = self._timer
                    assert timer is not None
                    timer.start()
                    step = runner.submit(batch)
                    step.wait()
                    timed.append(timer.stop())
                    return step

                _run(runner, kind, watch)
                add_graph_times(cell, timed)
        runner.close()

    def run_profiled(self, kinds: Sequence[Kind]) -> None:
        """For nsys and ncu: the same steps between cudaProfilerStart and Stop, with NVTX ranges."""
        from deltaserve.engine.ops.cuda.nvtx import NvtxTracer

        profiler = sys.modules["cupy"].cuda.profiler
        runner = self._runner(cuda_graph=False, tracer=NvtxTracer())

        def run(batch: ScheduledBatch) -> SubmittedStep:
            profiler.start()
            step = runner.submit(batch)
            step.wait()
            profiler.stop()
            return step

        for kind in kinds:
            _run(runner, kind, run)
        runner.close()

    def _runner(self, *, cuda_graph: bool, tracer: Tracer | None) -> ModelRunner:
        return create_model_runner(
            self._model,
            replace(self._backend, tracer=tracer),
            self._weights,
            vocab_limit=self._model.vocab_size,
            cuda_graph=cuda_graph,
        )


def _run(runner: ModelRunner, kind: Kind, run: RunStep) -> None:
    """The steps of a kind by `run`, and what has to come before them without it."""
    for _ in range(1 if kind.decode else PREFILL_RUNS):
        scheduler = Scheduler(runner.capacity)
        steps_before = 8 + kind.rows * kind.length // runner.capacity.prefill_chunk
        max_tokens = steps_before + DECODE_STEPS if kind.decode else 1
        vocab = runner.vocab_limit
        for sequence in random_sequences(kind.rows, kind.length, max_tokens, vocab):
            scheduler.add(sequence)
        num_run = 0
        while scheduler.has_work and num_run < (DECODE_STEPS if kind.decode else 1):
            batch = scheduler.schedule()
            wanted = not kind.decode or (len(batch.decodes) == kind.rows and not batch.prefills)
            num_run += wanted
            step = run(batch) if wanted else runner.submit(batch)
            tokens = step.wait()
            scheduler.update(batch, tokens.token_ids, tokens.logprobs)


def _spans(batch: ScheduledBatch) -> Spans:
    decodes = [(row.position, row.position + 1) for row in batch.decodes]
    return decodes + [(row.start, row.end) for row in batch.prefills]


def _card() -> str:
    properties = sys.modules["cupy"].cuda.runtime.getDeviceProperties(0)
    return str(properties["name"].decode())
