"""Times a ModelRunner under the scheduler, without HTTP or text: decode steps and prompts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from deltaserve.engine.model_runner import ModelRunner
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.scheduler import Scheduler
from deltaserve.engine.sequence import Sequence

_TOKENS = 40
_WARM_TOKENS = 8


@dataclass(frozen=True)
class Step:
    """`context`: the mean of the decode rows, this token included. Seconds: `wall` from the step
    before to this one being read, `host` of the thread in it, `busy` and `idle` on the device's
    clock (see `StepTiming`)."""

    num_prefills: int
    num_decodes: int
    context: float
    wall: float
    host: float
    busy: float
    idle: float


def run_requests(runner: ModelRunner, sequences: Iterable[Sequence]) -> list[Step]:
    """Runs them to their ends as the engine does: two steps overlap."""
    scheduler = Scheduler(runner.capacity)
    for sequence in sequences:
        scheduler.add(sequence)
    steps: list[Step] = []
    in_flight = None
    last = time.perf_counter()
    while scheduler.has_work:
        begin = time.perf_counter()
        previous, in_flight = in_flight, None
        batch = scheduler.schedule()
        if not batch.is_empty:
            in_flight = (batch, runner.submit(batch))
        if previous is None:
            continue
        batch, step = previous
        submitted = time.perf_counter()
        tokens = step.wait()
        waited = time.perf_counter()
        scheduler.update(batch, tokens.token_ids, tokens.logprobs)
        now = time.perf_counter()
        host = now - begin - (waited - submitted)
        times = now - last, host, step.timing.busy, step.timing.idle
        context = float(np.mean([d.position + 1 for d in batch.decodes] or [0]))
        steps.append(Step(len(batch.prefills), len(batch.decodes), context, *times))
        last = now
    return steps


def random_sequences(count: int, length: int, max_tokens: int, vocab: int) -> list[Sequence]:
    """Greedy ones of random ids."""
    rng = np.random.default_rng([count, length])
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return [
        Sequence(f"{i}", tuple(rng.integers(0, vocab, length).tolist()), params)
        for i in range(count)
    ]


def timings(
    runner: ModelRunner,
    batches: tuple[int, ...] = (1, 8, 64),
    prompts: tuple[tuple[int, int], ...] = ((1, 1024), (1, 8192), (64, 128)),
    context: int = 128,
) -> Iterator[dict[str, Any]]:
    vocab = runner.vocab_limit
    for rows in batches:
        # The first are ready while the last are still prompts. Of the steps in which all decode,
        # those nearest to the context; prompts are shorter by what most of them will have grown.
        ramp = rows * context // runner.capacity.prefill_chunk
        length = max(1, context - (_TOKENS + ramp) // 2)
        sequences = random_sequences(rows, length, _WARM_TOKENS + _TOKENS + ramp, vocab)
        steps = run_requests(runner, sequences)
        full = [step for step in steps if not step.num_prefills and step.num_decodes == rows]
        full = sorted(full[_WARM_TOKENS:], key=lambda step: abs(step.context - context))[:_TOKENS]
        yield {
            "what": f"decode step, batch {rows}, context {context}",
            "mean context": statistics.mean(step.context for step in full),
            "ms": 1e3 * statistics.median(step.wall for step in full),
            "busy ms": 1e3 * statistics.median(step.busy for step in full),
            "idle ms": 1e3 * statistics.median(step.idle for step in full),
            "host ms": 1e3 * statistics.median(step.host for step in full),
            "steps": len(full),
        }
    for count, length in prompts:
        runs = [run_requests(runner, random_sequences(count, length, 1, vocab)) for _ in range(3)]
        best = min(runs, key=lambda steps: sum(step.wall for step in steps))
        seconds = sum(step.wall for step in best)
        yield {
            "what": f"prefill {count} x {length}",
            "ms": 1e3 * seconds,
            "busy ms": 1e3 * sum(step.busy for step in best),
            "host ms": 1e3 * sum(step.host for step in best),
            "tokens/s": count * length / seconds,
        }
