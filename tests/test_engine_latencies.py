"""Latencies: what each histogram holds after a life of known times."""

from __future__ import annotations

import pytest

from deltaserve.engine.latencies import BOUNDS, Histogram, Latencies
from deltaserve.engine.llm_engine import Submitted
from deltaserve.engine.sequence import FinishReason, RequestOutput


def token(request_id: str, *token_ids: int) -> RequestOutput:
    return RequestOutput(request_id, token_ids)


def seen(latencies: Latencies) -> dict[str, tuple[int, float]]:
    """(count, sum) of the histograms that hold something."""
    return {
        name: (sum(histogram.counts), round(histogram.sum, 6))
        for name, histogram in latencies.histograms.items()
        if any(histogram.counts)
    }


def test_a_value_is_in_the_bucket_of_the_first_bound_that_is_not_below_it() -> None:
    histogram = Histogram((1.0, 2.0), [0, 0, 0])
    for value in (0.0, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)
    histogram.observe(9.0, times=3)
    assert (histogram.counts, histogram.sum) == ([2, 2, 4], 34.0)


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_rise(name: str) -> None:
    assert list(BOUNDS[name]) == sorted(set(BOUNDS[name]))


def test_the_life_of_two_requests() -> None:
    latencies = Latencies()
    latencies.admit("a", 10.0, 7)
    latencies.admit("b", 11.0, 5)
    latencies.step([], Submitted(("a",), 7), began=12.0, now=12.5)
    latencies.step([token("a", 1)], Submitted(("b",), 5), began=13.0, now=14.0)
    latencies.step([token("a", 2), token("b", 3)], Submitted(), began=15.0, now=16.0)
    latencies.step([token("a", 4), token("b", 5)], Submitted(), began=17.0, now=19.0)
    latencies.end("a", FinishReason.LENGTH, 100.0)
    latencies.end("b", FinishReason.STOP, 100.0)
    assert seen(latencies) == {
        "request_queue_time_seconds": (2, (12 - 10) + (13 - 11)),
        "time_to_first_token_seconds": (2, (14 - 10) + (16 - 11)),
        "inter_token_latency_seconds": (3, 2 + 3 + 3),
        "e2e_request_latency_seconds": (2, (19 - 10) + (19 - 11)),
        "request_prefill_time_seconds": (2, (14 - 12) + (16 - 13)),
        "request_decode_time_seconds": (2, (19 - 14) + (19 - 16)),
        "request_prompt_tokens": (2, 12),
        "request_generation_tokens": (2, 5),
        "iteration_tokens_total": (4, 7 + (5 + 1) + 2 + 2),
        "step_seconds": (4, 0.5 + 1 + 1 + 2),
    }


@pytest.mark.parametrize("reason", [FinishReason.ABORT, FinishReason.ERROR])
def test_what_ends_early_counts_in_what_it_reached(reason: FinishReason) -> None:
    latencies = Latencies()
    latencies.admit("queued", 1.0, 3)
    latencies.admit("begun", 1.0, 3)
    latencies.step([], Submitted(("begun",), 3), began=2.0, now=2.0)
    latencies.step([token("begun", 1)], Submitted(), began=3.0, now=4.0)
    for request_id in ("queued", "begun"):
        latencies.end(request_id, reason, 5.0)
    assert seen(latencies).keys() == {
        "request_queue_time_seconds",
        "time_to_first_token_seconds",
        "iteration_tokens_total",
        "step_seconds",
    }


def test_an_answer_without_tokens_is_a_whole_one() -> None:
    latencies = Latencies()
    latencies.admit("echo", 1.0, 3)
    latencies.step([], Submitted(("echo",), 3), began=2.0, now=2.0)
    latencies.end("echo", FinishReason.LENGTH, 4.0)
    assert seen(latencies)["e2e_request_latency_seconds"] == (1, 3.0)
    assert seen(latencies)["request_generation_tokens"] == (1, 0.0)


def test_outputs_of_forgotten_requests_are_ignored() -> None:
    latencies = Latencies()
    latencies.step([token("gone", 1)], Submitted(("gone",), 0), began=1.0, now=2.0)
    assert seen(latencies).keys() == {"step_seconds"}
