"""GET /metrics: the engine's own counts under vLLM's names, and ours under `deltaserve:`.

Nothing is counted here: each scrape asks the engine's process.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.utils import floatToGoString
from starlette.requests import Request
from starlette.responses import Response

from deltaserve.engine.engine_request import EngineUnavailable
from deltaserve.engine.messages import EngineStats

from .errors import ApiError
from .state import ServerState

LATENCY_PREFIX = {"step_seconds": "deltaserve:"}  # the others have names of vLLM's
LATENCY_TEXTS = {
    "time_to_first_token_seconds": "From a request's arrival to its first token",
    "inter_token_latency_seconds": "From one token of a request to the next",
    "e2e_request_latency_seconds": "From arrival to the last token, of whole answers",
    "request_queue_time_seconds": "From arrival to the first step with the request",
    "request_prefill_time_seconds": "From the first step to the first token, of whole answers",
    "request_decode_time_seconds": "From the first to the last token, of whole answers",
    "request_prompt_tokens": "Tokens of the prompt, of whole answers",
    "request_generation_tokens": "Tokens generated, of whole answers",
    "iteration_tokens_total": "Tokens of one step, of prompts and generated",
    "step_seconds": "One step as the engine's thread sees it",
}


def gauges(stats: EngineStats) -> list[tuple[str, str, float]]:
    """(name, meaning, value)"""
    blocks = stats.num_blocks - stats.num_free_blocks
    slots = stats.num_state_slots - stats.num_free_state_slots
    snapshots = stats.num_snapshots - stats.num_free_snapshots
    return [
        ("vllm:num_requests_running", "Requests in a batch", stats.num_running),
        ("vllm:num_requests_waiting", "Requests in the queue", stats.num_waiting),
        (
            "vllm:kv_cache_usage_perc",
            "KV cache blocks in use, 1 is all",
            blocks / stats.num_blocks if stats.num_blocks else 0.0,
        ),
        ("deltaserve:state_slots_in_use", "Recurrent-state slots in use", slots),
        ("deltaserve:state_slots", "Recurrent-state slots", stats.num_state_slots),
        ("deltaserve:snapshots_in_use", "States of cached prefixes", snapshots),
        ("deltaserve:snapshots", "States of cached prefixes at most", stats.num_snapshots),
        (
            "deltaserve:decode_graph_rows",
            "Rows of the last decode pass's CUDA graph, padding included; 0 without graphs",
            stats.decode_graph_rows,
        ),
    ]


def counters(stats: EngineStats) -> list[tuple[str, str, float]]:
    """(name without _total, meaning, value)"""
    return [
        ("vllm:num_preemptions", "Requests preempted", stats.num_preemptions),
        ("vllm:prompt_tokens", "Prompt tokens processed", stats.num_prompt_tokens),
        ("vllm:generation_tokens", "Tokens generated", stats.num_generation_tokens),
        (
            "vllm:prefix_cache_queries",
            "Prompt tokens looked up in the prefix cache",
            stats.num_prefix_query_tokens,
        ),
        (
            "vllm:prefix_cache_hits",
            "Prompt tokens found in the prefix cache",
            stats.num_prefix_hit_tokens,
        ),
        (
            "deltaserve:prefix_cache_block_evictions",
            "Cached KV blocks taken for something else",
            stats.num_block_evictions,
        ),
        (
            "deltaserve:prefix_cache_snapshot_evictions",
            "Cached states overwritten by newer ones",
            stats.num_snapshot_evictions,
        ),
        ("deltaserve:steps", "Engine steps", stats.num_steps),
        (
            "deltaserve:host_seconds",
            "Work of the engine's thread in steps, waiting for the device apart",
            stats.host_seconds,
        ),
        ("deltaserve:device_busy_seconds", "Steps on the device", stats.device_busy_seconds),
        (
            "deltaserve:device_idle_seconds",
            "Gaps on the device between steps that followed each other",
            stats.device_idle_seconds,
        ),
    ]


class _Scrape:
    """A prometheus collector over one EngineStats."""

    def __init__(self, stats: EngineStats, model_name: str) -> None:
        self._stats = stats
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        label = ["model_name"]
        for name, text, value in gauges(self._stats):
            gauge = GaugeMetricFamily(name, text, labels=label)
            gauge.add_metric([self._model], value)
            yield gauge
        for name, text, value in counters(self._stats):
            counter = CounterMetricFamily(name, text, labels=label)
            counter.add_metric([self._model], value)
            yield counter
        finished = CounterMetricFamily(
            "vllm:request_success", "Requests ended", labels=[*label, "finished_reason"]
        )
        for reason, value in self._stats.num_finished.items():
            finished.add_metric([self._model, reason], value)
        yield finished
        refused = CounterMetricFamily(
            "deltaserve:requests_refused", "Not admitted by the engine", labels=[*label, "status"]
        )
        for status, value in self._stats.num_refused.items():
            refused.add_metric([self._model, status], value)
        yield refused
        for name, text in LATENCY_TEXTS.items():
            if name in self._stats.histograms:
                yield self._histogram(name, text)

    def _histogram(self, name: str, text: str) -> Metric:
        observed = self._stats.histograms[name]
        family = HistogramMetricFamily(
            LATENCY_PREFIX.get(name, "vllm:") + name, text, labels=["model_name"]
        )
        totals = list(accumulate(observed.counts))
        bounds = [*map(floatToGoString, observed.bounds), "+Inf"]
        family.add_metric(
            [self._model], list(zip(bounds, totals, strict=True)), sum_value=observed.sum
        )
        return family


async def metrics(request: Request) -> Response:
    state: ServerState = request.app.state.server
    try:
        stats = await state.engine.stats()
    except EngineUnavailable as error:
        raise ApiError(503, str(error)) from None
    registry = CollectorRegistry()
    registry.register(_Scrape(stats, state.served_names[0]))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)
