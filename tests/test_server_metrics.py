"""/metrics after a scripted load: equal to what the answers said was done."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest

from tools.hostile_requests import completion, request

from .scripted_engine import ENDLESS, ROW_ERROR, output_id
from .server_process import ROOT, ServerProcess, start_scripted, wait_until

PROMPT = [50, 60, 70]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    started = start_scripted(
        tmp_path_factory.mktemp("metrics"), step_s=0.02, max_running=4, max_queue=2
    )
    yield started.wait_ready()
    started.stop()


def finish_reasons(answer: dict[str, Any]) -> list[str]:
    return [choice["finish_reason"] for choice in answer["choices"]]


def test_metrics_equal_the_load(server: ServerProcess) -> None:
    """The first of this module: its server has done nothing before."""

    def ask(status: int = 200, **fields: Any) -> dict[str, Any]:
        response = server.complete(**{"model": "scripted", "prompt": PROMPT, **fields})
        assert response.status_code == status, response.text
        answer: dict[str, Any] = response.json()
        return answer

    stop = chr(output_id(PROMPT, 3)) + chr(output_id(PROMPT, 4))
    last = chr(output_id(PROMPT, 6))
    answers = [
        ask(max_tokens=5),
        ask(max_tokens=9, prompt=[PROMPT, [9]]),
        ask(max_tokens=4, n=2),
        ask(max_tokens=0, echo=True),
        ask(max_tokens=3, echo=True, logprobs=1),
        ask(max_tokens=7, stop=[last]),
        ask(max_tokens=50, stop=[stop]),
    ]
    ask(500, prompt=[ROW_ERROR])
    ask(400, max_tokens=600)
    ask(429, prompt=[[ENDLESS]] * 7)
    assert [finish_reasons(answer) for answer in answers] == [
        ["length"],
        ["length"] * 2,
        ["length"] * 2,
        ["length"],
        ["length"],
        ["stop"],
        ["stop"],
    ]
    with socket.create_connection(("127.0.0.1", server.port)) as leaver:
        leaver.sendall(request(completion("scripted", prompt=[ENDLESS])))
        wait_until("running", lambda: server.metrics()["vllm:num_requests_running"] == 1)
    wait_until("nothing left", server.is_idle)

    counted = server.metrics()
    usages = [answer["usage"] for answer in answers]
    assert usages[-1]["completion_tokens"] == 5
    assert usages[-2]["completion_tokens"] == 7
    whole = sum(usage["completion_tokens"] for usage in usages)
    # What the engine made before it heard of the stop string, a few steps' worth.
    assert 0 <= counted["vllm:generation_tokens_total"] - whole < 50 - 5
    refused_batch = counted["vllm:request_success_total:abort"] - 1
    assert 0 < refused_batch <= 6  # those of the 429 that had been admitted
    assert counted["vllm:request_success_total:length"] == 7
    assert counted["vllm:request_success_total:stop"] == 2
    assert counted["vllm:request_success_total:error"] == 1
    assert counted["deltaserve:requests_refused_total:400"] == 1
    assert counted["deltaserve:requests_refused_total:429"] == 1
    for name in ("e2e_request_latency_seconds", "request_prompt_tokens"):
        assert counted[f"vllm:{name}_count"] == 7 + 2
    # One prompt of n = 2 is two sequences; usage counts it once.
    assert counted["vllm:request_prompt_tokens_sum"] == (
        sum(usage["prompt_tokens"] for usage in usages) + len(PROMPT)
    )
    with_tokens = 7 + 2 - 1
    assert counted["vllm:request_prefill_time_seconds_count"] == with_tokens
    assert counted["vllm:request_decode_time_seconds_count"] == with_tokens
    assert counted["vllm:time_to_first_token_seconds_count"] == with_tokens
    assert counted["vllm:request_generation_tokens_sum"] == counted["vllm:generation_tokens_total"]
    assert counted["vllm:iteration_tokens_total_sum"] == (
        counted["vllm:prompt_tokens_total"] + counted["vllm:generation_tokens_total"]
    )
    assert counted["deltaserve:step_seconds_count"] == counted["deltaserve:steps_total"]


def test_latencies_begin_at_the_clients_first_byte(server: ServerProcess) -> None:
    """The parts of a request's life add up to the whole, as the client's own clock bounds it."""
    before = server.metrics()
    response = server.complete(model="scripted", prompt=PROMPT, max_tokens=10)
    after = server.metrics()

    def seconds(name: str) -> float:
        assert after[f"vllm:{name}_count"] > before[f"vllm:{name}_count"]
        return after[f"vllm:{name}_sum"] - before[f"vllm:{name}_sum"]

    whole = seconds("e2e_request_latency_seconds")
    assert 0 < whole <= response.elapsed.total_seconds()
    assert whole == pytest.approx(
        seconds("request_queue_time_seconds")
        + seconds("request_prefill_time_seconds")
        + seconds("request_decode_time_seconds")
    )
    assert seconds("request_decode_time_seconds") == pytest.approx(
        seconds("inter_token_latency_seconds")
    )


def test_buckets_are_cumulative_and_end_with_the_count(server: ServerProcess) -> None:
    server.complete(model="scripted", prompt=PROMPT, max_tokens=10)
    lines = server.client.get("/metrics").text.splitlines()
    buckets = [
        float(line.rpartition(" ")[2])
        for line in lines
        if line.startswith("vllm:inter_token_latency_seconds_bucket")
    ]
    assert buckets == sorted(buckets)
    assert buckets[-1] == server.metrics()["vllm:inter_token_latency_seconds_count"] >= 9


def test_the_documented_metrics_are_those_there_are(server: ServerProcess) -> None:
    text = (ROOT / "docs/operations.md").read_text()
    documented = set(re.findall(r"`((?:vllm|deltaserve):\w+)", text))
    families = re.findall(r"^# TYPE (\S+) (\w+)", server.client.get("/metrics").text, re.MULTILINE)
    assert {name for name, _ in families} == documented
