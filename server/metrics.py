"""GET /metrics: the engine's own counts under vLLM's names, and ours under `deltaserve:`.

Nothing is counted here: each scrape asks the engine's process.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from starlette.requests import Request
from starlette.responses import Response

from deltaserve.engine.engine_request import EngineUnavailable
from deltaserve.engine.messages import EngineStats

from .errors import ApiError
from .state import ServerState


class _Scrape:
    """A prometheus collector over one EngineStats."""

    def __init__(self, stats: EngineStats, model_name: str) -> None:
        self._stats = stats
        self._model = model_name

    def collect(self) -> Iterator[Metric]:
        stats = self._stats
        blocks = stats.num_blocks - stats.num_free_blocks
        gauges: list[tuple[str, str, float]] = [
            ("vllm:num_requests_running", "Requests in a batch", stats.num_running),
            ("vllm:num_requests_waiting", "Requests in the queue", stats.num_waiting),
            (
                "vllm:kv_cache_usage_perc",
                "KV cache blocks in use, 1 is all",
                blocks / stats.num_blocks if stats.num_blocks else 0.0,
            ),
            (
                "deltaserve:state_slots_in_use",
                "Recurrent-state slots in use",
                stats.num_state_slots - stats.num_free_state_slots,
            ),
            ("deltaserve:state_slots", "Recurrent-state slots", stats.num_state_slots),
            (
                "deltaserve:snapshots_in_use",
                "States of cached prefixes",
                stats.num_snapshots - stats.num_free_snapshots,
            ),
            ("deltaserve:snapshots", "States of cached prefixes at most", stats.num_snapshots),
        ]
        counters = [
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
        ]
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(name, text, labels=["model_name"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(name, text, labels=["model_name"])
            counter.add_metric([self._model], value)
            yield counter
        finished = CounterMetricFamily(
            "vllm:request_success", "Requests ended", labels=["model_name", "finished_reason"]
        )
        for reason, value in stats.num_finished.items():
            finished.add_metric([self._model, reason], value)
        yield finished


async def metrics(request: Request) -> Response:
    state: ServerState = request.app.state.server
    try:
        stats = await state.engine.stats()
    except EngineUnavailable as error:
        raise ApiError(503, str(error)) from None
    registry = CollectorRegistry()
    registry.register(_Scrape(stats, state.served_names[0]))
    return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)
