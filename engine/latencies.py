"""Latencies: how long requests wait, take and run, as histograms for /metrics.

One clock for all of them: `time.monotonic()`, which all processes of a host share. A request that
is aborted or fails counts in what it reached (queue, first token, tokens between) and not in what a
whole one takes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from .sequence import FinishReason, RequestOutput

_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75)
_REQUEST_S = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0)
_FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5)
_LONG_S = (10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
_SHORT_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2)
_COUNT = tuple(float(1 << n) for n in range(21))

BOUNDS: dict[str, tuple[float, ...]] = {
    "time_to_first_token_seconds": _FIRST_S + _LONG_S,
    "inter_token_latency_seconds": (*_TOKEN_S, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    "e2e_request_latency_seconds": (*_SHORT_S, *_REQUEST_S, 120.0, 240.0, 480.0, 960.0, 1920.0),
    "request_queue_time_seconds": (*_SHORT_S, *_REQUEST_S, 120.0, 240.0, 480.0, 960.0, 1920.0),
    "request_prefill_time_seconds": (*_SHORT_S, *_REQUEST_S, 120.0, 240.0, 480.0, 960.0, 1920.0),
    "request_decode_time_seconds": (*_SHORT_S, *_REQUEST_S, 120.0, 240.0, 480.0, 960.0, 1920.0),
    "request_prompt_tokens": _COUNT,
    "request_generation_tokens": _COUNT,
    "iteration_tokens_total": _COUNT[:16],
    "step_seconds": (*_TOKEN_S, 1.0, 2.5, 5.0, 10.0, 30.0),
}
"""Upper bounds of the buckets, by name; the last bucket has none."""


@dataclass
class Histogram:
    """`counts[i]`: values up to `bounds[i]` and over the bound before; one more for the rest."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


@dataclass
class _Life:
    """Of one request; a time that has not come yet is None."""

    arrival: float
    num_prompt_tokens: int
    scheduled: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    num_tokens: int = 0


class Submitted(Protocol):
    """By one step: requests that were in none before, and the tokens of prompts it computes."""

    @property
    def first_scheduled(self) -> Sequence[str]: ...

    @property
    def num_prompt_tokens(self) -> int: ...


class Latencies:
    """Told of each request from its admission to its end, and of each step."""

    def __init__(self) -> None:
        self.histograms = {
            name: Histogram(bounds, [0] * (len(bounds) + 1)) for name, bounds in BOUNDS.items()
        }
        self._lives: dict[str, _Life] = {}

    def admit(self, request_id: str, arrival: float, num_prompt_tokens: int) -> None:
        self._lives[request_id] = _Life(arrival, num_prompt_tokens)

    def _schedule(self, request_ids: Iterable[str], now: float) -> None:
        for request_id in request_ids:
            life = self._lives.get(request_id)
            if life is not None and life.scheduled is None:
                life.scheduled = now
                self._observe("request_queue_time_seconds", now - life.arrival)

    def step(
        self, outputs: Sequence[RequestOutput], submitted: Submitted, began: float, now: float
    ) -> None:
        """One step, from `began` to `now`: what it submitted, and what it read of the one before. A
        request costs a look-up; what a step gives many of them alike is observed once."""
        self._schedule(submitted.first_scheduled, began)
        num_tokens = submitted.num_prompt_tokens
        previous: list[float] = []
        for output in outputs:
            count = len(output.token_ids)
            life = self._lives.get(output.request_id)
            if not count or life is None:
                continue
            num_tokens += count
            life.num_tokens += count
            if life.last_token is None:
                life.first_token = now
                self._observe("time_to_first_token_seconds", now - life.arrival)
            else:
                previous.append(life.last_token)
            life.last_token = now
        for last_token, times in Counter(previous).items():
            self._observe("inter_token_latency_seconds", now - last_token, times)
        if num_tokens:
            self._observe("iteration_tokens_total", num_tokens)
        self._observe("step_seconds", now - began)

    def end(self, request_id: str, reason: FinishReason, now: float) -> None:
        """Forgets the request; a whole answer's times are counted up to its last token, or to `now`
        if it has none."""
        life = self._lives.pop(request_id)
        if reason not in (FinishReason.STOP, FinishReason.LENGTH) or life.scheduled is None:
            return
        self._observe("request_prompt_tokens", life.num_prompt_tokens)
        self._observe("request_generation_tokens", life.num_tokens)
        end = now if life.last_token is None else life.last_token
        self._observe("e2e_request_latency_seconds", end - life.arrival)
        if life.first_token is not None:
            self._observe("request_prefill_time_seconds", life.first_token - life.scheduled)
            self._observe("request_decode_time_seconds", end - life.first_token)

    def _observe(self, name: str, value: float, times: int = 1) -> None:
        self.histograms[name].observe(value, times)
