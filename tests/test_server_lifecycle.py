"""Starting, draining and dying, each with a real server and engine process of its own."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .scripted_engine import ENDLESS, HANG, output_id
from .server_process import ServerProcess, is_alive, start_scripted, wait_until

Start = Callable[..., ServerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[ServerProcess] = []

    def start_one(**script: Any) -> ServerProcess:
        started.append(start_scripted(tmp_path, **script))
        return started[-1]

    yield start_one
    for server in started:
        server.stop()


class Stream(threading.Thread):
    """A client that reads one stream to its end."""

    def __init__(self, server: ServerProcess, prompt: list[int], max_tokens: int) -> None:
        super().__init__()
        self._server = server
        self._fields = {
            "model": "scripted",
            "prompt": prompt,
            "max_tokens": max_tokens,
            "stream": True,
        }
        self.events: list[str] = []
        self.start()

    def run(self) -> None:
        with self._server.client.stream("POST", "/v1/completions", json=self._fields) as response:
            for line in response.iter_lines():
                if line:
                    self.events.append(line.removeprefix("data: "))

    def finish(self) -> list[Any]:
        """The events; [DONE] must be the last and is left out."""
        self.join(60)
        assert self.events[-1] == "[DONE]"
        return [json.loads(event) for event in self.events[:-1]]


def assert_clean_end(server: ServerProcess, engine_pid: int) -> None:
    assert server.wait() == 0
    assert not is_alive(engine_pid)
    assert "Traceback" not in server.log()
    assert list(server.temporary.iterdir()) == []


def all_begun(streams: list[Stream]) -> bool:
    return all(stream.events for stream in streams)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_eight_streams_finish(start: Start, number: int) -> None:
    """Sent to the whole process group, as Ctrl-C and service managers do."""
    server = start(step_s=0.01, max_running=8, max_queue=8).wait_ready()
    streams = [Stream(server, [50 + n], 60) for n in range(8)]
    wait_until("all begun", lambda: all_begun(streams))
    engine_pid = server.engine_pid
    os.killpg(server.process.pid, number)
    wait_until("draining", lambda: server.client.get("/ready").status_code == 503)
    refused = server.complete(model="scripted", prompt="a")
    assert (refused.status_code, refused.json()["error"]["message"]) == (
        503,
        "the server is draining",
    )
    assert server.client.get("/health").status_code == 200
    for n, stream in enumerate(streams):
        events = stream.finish()
        text = "".join(event["choices"][0]["text"] for event in events)
        assert text == "".join(chr(output_id([50 + n], i)) for i in range(60))
        assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert_clean_end(server, engine_pid)


def test_after_the_timeout_open_requests_end_with_an_error(start: Start) -> None:
    server = start(step_s=0.01, shutdown_timeout=0.1).wait_ready()
    streams = [Stream(server, [50], 500), Stream(server, [60], 500)]
    wait_until("all begun", lambda: all_begun(streams))
    engine_pid = server.engine_pid
    server.signal(signal.SIGTERM)
    for stream in streams:
        error = stream.finish()[-1]["error"]
        assert error["message"] == "the server is shutting down"
        assert error["type"] == "service_unavailable_error"
    assert_clean_end(server, engine_pid)


def test_a_second_signal_does_not_wait(start: Start) -> None:
    server = start(step_s=0.01, shutdown_timeout=3600).wait_ready()
    stream = Stream(server, [50], 500)
    wait_until("begun", lambda: stream.events)
    engine_pid = server.engine_pid
    server.signal(signal.SIGINT)
    wait_until("draining", lambda: server.client.get("/ready").status_code == 503)
    server.signal(signal.SIGINT)
    assert "error" in stream.finish()[-1]
    assert_clean_end(server, engine_pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_until_the_very_end_change_nothing(start: Start, number: int) -> None:
    server = start().wait_ready()
    engine_pid = server.engine_pid
    while server.process.poll() is None:
        server.signal(number)
    assert_clean_end(server, engine_pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_loading(start: Start, number: int) -> None:
    server = start(load_s=3600.0)
    wait_until("a stage", lambda: "reading" in server.client.get("/ready").text)
    assert server.client.get("/ready").status_code == 503
    assert server.client.get("/health").status_code == 200
    refused = server.complete(model="scripted", prompt="a")
    assert refused.status_code == 503
    assert refused.json()["error"]["message"] == "the model is loading: reading"
    assert server.client.get("/v1/models").status_code == 503
    engine_pid = server.engine_pid
    os.killpg(server.process.pid, number)
    assert_clean_end(server, engine_pid)


def test_a_load_error_ends_the_server_with_its_message(start: Start) -> None:
    server = start(load_error="model.safetensors: tensor x is missing", load_s=0.1)
    assert server.wait() == 1
    assert "cannot load: model.safetensors: tensor x is missing" in server.log()
    assert "Traceback" not in server.log()
    assert list(server.temporary.iterdir()) == []


def test_a_setting_that_cannot_be_followed_ends_it_like_a_wrong_flag(start: Start) -> None:
    server = start(config_error="kv_cache_memory: must be at least 7, got 1", load_s=0.1)
    assert server.wait() == 2
    (line,) = (line for line in server.log().splitlines() if " INFO " not in line)
    assert line.endswith(" ERROR --kv-cache-memory: must be at least 7, got 1")
    assert list(server.temporary.iterdir()) == []


def test_a_killed_engine(start: Start) -> None:
    server = start(step_s=0.01).wait_ready()
    decoding = Stream(server, [50], 500)
    prefilling = Stream(server, [ENDLESS], 5)
    wait_until("begun", lambda: decoding.events)
    wait_until("running", lambda: server.metrics()["vllm:num_requests_running"] == 2)
    os.kill(server.engine_pid, signal.SIGKILL)
    for stream in (decoding, prefilling):
        error = stream.finish()[-1]["error"]
        assert error["message"] == "the engine process ended (exit code -9)"
    for path in ("/health", "/ready", "/metrics"):
        response = server.client.get(path)
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "the engine process ended (exit code -9)"
    assert server.complete(model="scripted", prompt="a").status_code == 503
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert list(server.temporary.iterdir()) == []


def test_a_stuck_engine(start: Start) -> None:
    server = start(step_timeout=2.0).wait_ready()
    stream = Stream(server, [HANG], 5)
    assert "the engine is stuck" in stream.finish()[-1]["error"]["message"]
    for path in ("/health", "/ready"):
        assert server.client.get(path).status_code == 503
    engine_pid = server.engine_pid
    server.signal(signal.SIGTERM)
    assert_clean_end(server, engine_pid)


def test_a_killed_server_takes_its_engine_along(start: Start) -> None:
    server = start().wait_ready()
    engine_pid = server.engine_pid
    server.signal(signal.SIGKILL)
    server.wait()
    wait_until("engine gone", lambda: not is_alive(engine_pid))
    wait_until("directory gone", lambda: list(server.temporary.iterdir()) == [])
