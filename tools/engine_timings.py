"""Times a ModelRunner under the scheduler, without HTTP or text: decode steps and prompts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from deltaserve.engine.model_runner import ModelRunner
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.scheduler import Scheduler
from deltaserve.engine.sequence import Sequence

_TOKENS = 24
_WARM_TOKENS = 4


def timings(
    runner: ModelRunner,
    batches: tuple[int, ...] = (1, 8, 64),
    prompts: tuple[tuple[int, int], ...] = ((1, 1024), (1, 8192), (64, 128)),
    context: int = 128,
) -> Iterator[dict[str, Any]]:
    for rows in batches:
        steps = _run(runner, rows, context, _WARM_TOKENS + _TOKENS)
        full = [seconds for prefills, decodes, seconds in steps if not prefills and decodes == rows]
        median = statistics.median(full[_WARM_TOKENS:])
        yield {"what": f"decode step, batch {rows}, context {context}", "ms": 1e3 * median}
    for count, length in prompts:
        seconds = [sum(s for _, _, s in _run(runner, count, length, 1)) for _ in range(3)]
        rate = count * length / min(seconds)
        what = f"prefill {count} x {length}"
        yield {"what": what, "ms": 1e3 * min(seconds), "tokens/s": rate}


def _run(
    runner: ModelRunner, count: int, length: int, max_tokens: int
) -> list[tuple[int, int, float]]:
    """(prompts, decode rows, seconds) of each step; two steps overlap, as in the engine."""
    rng = np.random.default_rng([count, length])
    scheduler = Scheduler(runner.capacity)
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    for i in range(count):
        ids = tuple(rng.integers(0, runner.vocab_limit, length).tolist())
        scheduler.add(Sequence(f"{i}", ids, params))
    steps, in_flight = [], None
    last = time.perf_counter()
    while scheduler.has_work:
        previous, in_flight = in_flight, None
        batch = scheduler.schedule()
        if not batch.is_empty:
            in_flight = (batch, runner.submit(batch))
        if previous is None:
            continue
        tokens = previous[1].wait()
        scheduler.update(previous[0], tokens.token_ids, tokens.logprobs)
        now = time.perf_counter()
        steps.append((len(previous[0].prefills), len(previous[0].decodes), now - last))
        last = now
    return steps
