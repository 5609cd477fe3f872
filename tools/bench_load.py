"""Sends requests at a load and hands back what became of each.

A load is a number of streams, each with one request at a time, or a mean rate with exponential
gaps (Poisson arrivals), which does not wait for answers.
"""

from __future__ import annotations

import asyncio
import gc
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from tools.bench_answers import Outcome, read_outcome
from tools.bench_client import Answer, Client

PATH = "/v1/completions"


@dataclass(frozen=True)
class Load:
    """Exactly one of `concurrency` (streams) and `qps` (requests a second)."""

    concurrency: int | None = None
    qps: float | None = None

    def __post_init__(self) -> None:
        value = self.concurrency if self.qps is None else self.qps
        one = (self.concurrency is None) != (self.qps is None)
        if not one or value is None or not 0 < value < math.inf:
            raise ValueError("a load is a positive number of streams or of requests a second")

    def __str__(self) -> str:
        return f"c={self.concurrency}" if self.qps is None else f"QPS {self.qps:g}"


@dataclass(frozen=True)
class RunTimes:
    """`seconds` from the first request to the end of the last answer; `client_share` of it in
    which this process computed, `late_ms` the worst delay of a request behind its arrival time."""

    seconds: float
    client_share: float
    late_ms: float


async def run(
    client: Client, bodies: Sequence[bytes], load: Load, seed: str
) -> tuple[list[Outcome], RunTimes]:
    """Outcomes in the order of `bodies`."""
    gc.collect()
    gc.disable()  # a pause in the client would look like one of the server
    cpu, begin = time.process_time(), time.perf_counter()
    try:
        if load.concurrency is not None:
            answers, late = await _streams(client, bodies, load.concurrency), 0.0
        else:
            assert load.qps is not None
            answers, late = await _arrivals(client, bodies, load.qps, seed)
    finally:
        gc.enable()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - begin
    seconds = max(a.ended for a in answers) - min(a.started for a in answers)
    return [read_outcome(answer) for answer in answers], RunTimes(seconds, cpu / wall, 1e3 * late)


async def _streams(client: Client, bodies: Sequence[bytes], count: int) -> list[Answer]:
    answers: dict[int, Answer] = {}
    waiting = iter(enumerate(bodies))

    async def stream() -> None:
        for index, body in waiting:
            answers[index] = await client.post(PATH, body)

    await asyncio.gather(*(stream() for _ in range(count)))
    return [answers[index] for index in range(len(bodies))]


async def _arrivals(
    client: Client, bodies: Sequence[bytes], qps: float, seed: str
) -> tuple[list[Answer], float]:
    rng = random.Random(seed)
    arrival = time.perf_counter()
    late = 0.0
    tasks = []
    for body in bodies:
        await asyncio.sleep(max(0.0, arrival - time.perf_counter()))
        late = max(late, time.perf_counter() - arrival)
        tasks.append(asyncio.ensure_future(client.post(PATH, body)))
        arrival += rng.expovariate(qps)
    return await asyncio.gather(*tasks), late
