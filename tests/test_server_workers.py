"""Several HTTP workers over one engine: shared counts, a worker's death, a drained end."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deltaserve.engine.core_process import AttachedEngine, start_with_signals_blocked
from deltaserve.server.options import ServerOptions
from deltaserve.server.supervisor import run_worker

from .scripted_engine import ENDLESS, output_id
from .server_process import ServerProcess, is_alive, start_scripted, wait_until
from .test_server_lifecycle import Stream

NUM_WORKERS = 2


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    started = start_workers(tmp_path_factory.mktemp("workers"))
    yield started
    started.stop()


def start_workers(directory: Path) -> ServerProcess:
    started = start_scripted(
        directory, num_workers=NUM_WORKERS, step_s=0.01, max_running=8, max_queue=8
    )
    return started.wait_ready()


class CutStream(Stream):
    """One that may be cut short."""

    def run(self) -> None:
        with contextlib.suppress(httpx.RemoteProtocolError):
            super().run()


def worker_of(server: ServerProcess, request_id: str) -> int:
    """The number of the worker that logged this request's end."""
    line = wait_until(
        "logged",
        lambda: next((x for x in server.log().splitlines() if x.endswith(f"id={request_id}")), ""),
    )
    return int(line.partition(" worker ")[2].partition(":")[0])


def worker_pids(server: ServerProcess) -> set[int]:
    """Those that hold a listening socket beside the parent's: all children but the engine."""
    path = Path(f"/proc/{server.process.pid}/task/{server.process.pid}/children")
    found = set()
    for pid in map(int, path.read_text().split()):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
            if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes() and listens(pid):
                found.add(pid)
    return found


def listens(pid: int) -> bool:
    links = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            links.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    inodes = {link[8:-1] for link in links if link.startswith("socket:[")}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return any(row[3] == "0A" and row[9] in inodes for row in rows)


def test_every_worker_tells_the_counts_of_all(server: ServerProcess) -> None:
    for n in range(8):
        with httpx.Client(base_url=server.url) as client:
            body = {"model": "scripted", "prompt": [50 + n], "max_tokens": 3}
            assert client.post("/v1/completions", json=body).status_code == 200
    seen: set[int] = set()
    while len(seen) < NUM_WORKERS:
        with httpx.Client(base_url=server.url) as client:
            response = client.get("/metrics")
            assert 'vllm:generation_tokens_total{model_name="scripted"} 24.0' in response.text
            assert 'finished_reason="length",model_name="scripted"} 8.0' in response.text
            seen.add(worker_of(server, client.get("/nope").headers["x-request-id"]))


def test_a_dead_worker_takes_only_its_own_connections_along(server: ServerProcess) -> None:
    streams = [CutStream(server, [50 + n], 150) for n in range(4)]
    endless = [
        socket.create_connection(("127.0.0.1", server.port)) for _ in range(4)
    ]  # in prefill for ever, so that nothing is sent for them
    for connection in endless:
        body = b'{"model":"scripted","prompt":[%d],"max_tokens":1}' % ENDLESS
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
    wait_until("all run", lambda: server.metrics()["vllm:num_requests_running"] == 8)
    before = worker_pids(server)
    assert len(before) == NUM_WORKERS
    victim = min(before)
    os.kill(victim, signal.SIGKILL)
    wait_until("another", lambda: len(worker_pids(server) - before) == 1)
    for connection in endless:
        connection.close()
    wait_until("freed", server.is_idle)
    for n, stream in enumerate(streams):
        stream.join(60)
        if stream.events and stream.events[-1] == "[DONE]":
            text = "".join(e["choices"][0]["text"] for e in stream.finish())
            assert text == "".join(chr(output_id([50 + n], i)) for i in range(150))
    assert "starting another" in server.log()
    assert server.complete(model="scripted", prompt="a", max_tokens=1).status_code == 200


def test_who_comes_before_the_new_worker_has_loaded_waits_for_it(server: ServerProcess) -> None:
    os.kill(min(worker_pids(server)), signal.SIGKILL)
    body = b'{"model":"scripted","prompt":"a","max_tokens":1}'
    connections = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(12)]
    for connection in connections:  # some of them to the dead one's socket
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
        )
    for connection in connections:
        connection.settimeout(60)
        assert connection.recv(12) == b"HTTP/1.1 200"
        connection.close()


def test_none_is_ready_before_all_can_answer(tmp_path: Path) -> None:
    server = start_scripted(tmp_path, num_workers=NUM_WORKERS, load_s=1.0)
    try:
        pids = wait_until("begun", lambda: len(p := worker_pids(server)) == NUM_WORKERS and p)
        os.kill(min(pids), signal.SIGSTOP)
        body = {"model": "scripted", "prompt": "a", "max_tokens": 1}
        answers = []

        def other_answers() -> bool:
            with contextlib.suppress(httpx.ReadTimeout):  # the stopped one's connections
                answers.append(httpx.get(f"{server.url}/ready", timeout=0.5))
            with contextlib.suppress(httpx.ReadTimeout):
                url = f"{server.url}/v1/completions"
                return httpx.post(url, json=body, timeout=0.5).status_code == 200
            return False

        wait_until("the other one answers", other_answers)
        answers.clear()
        wait_until("asked", lambda: other_answers() and bool(answers))
        assert {answer.status_code for answer in answers} == {503}
        assert "loading: other workers" in answers[-1].json()["error"]["message"]
        os.kill(min(pids), signal.SIGCONT)
        server.wait_ready()
    finally:
        server.stop()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[ServerProcess]:
    started = start_workers(tmp_path)
    yield started
    started.stop()


def test_a_signal_lets_every_worker_finish(own_server: ServerProcess) -> None:
    server = own_server
    streams = [Stream(server, [50 + n], 60) for n in range(6)]
    wait_until("all begun", lambda: all(stream.events for stream in streams))
    children = worker_pids(server) | {server.engine_pid}
    os.killpg(server.process.pid, signal.SIGINT)  # as Ctrl-C does
    for n, stream in enumerate(streams):
        text = "".join(event["choices"][0]["text"] for event in stream.finish())
        assert text == "".join(chr(output_id([50 + n], i)) for i in range(60))
    assert server.wait() == 0
    assert not any(map(is_alive, children))
    assert "Traceback" not in server.log()


def test_an_engine_that_cannot_load_ends_all(tmp_path: Path) -> None:
    server = start_scripted(
        tmp_path, num_workers=NUM_WORKERS, load_error="no such tensor", load_s=0.3
    )
    assert server.wait() == 1
    assert "cannot load: no such tensor" in server.log()
    assert "Traceback" not in server.log()


def test_a_setting_that_cannot_be_followed_ends_all_with_one_line(tmp_path: Path) -> None:
    server = start_scripted(
        tmp_path, num_workers=NUM_WORKERS, config_error="max_num_seqs: too many", load_s=0.1
    )
    assert server.wait() == 2
    lines = [line for line in server.log().splitlines() if " INFO " not in line]
    assert len(lines) == 1
    assert lines[0].endswith("ERROR --max-num-seqs: too many")


def test_a_worker_that_comes_after_the_engines_end_says_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    """As where loading fails while it starts: its parent has said why."""
    engine = subprocess.Popen(["true"])
    engine.wait()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        options = ServerOptions("no-model", ("no-model",))
        attached = AttachedEngine("ipc:///nowhere", engine.pid)
        worker = multiprocessing.get_context("spawn").Process(
            target=run_worker, args=(options, 0, attached, listener, False, socket.socket())
        )
        start_with_signals_blocked(worker)
        worker.join()
    assert worker.exitcode == 1
    assert capfd.readouterr().err == ""


def test_a_killed_parent_leaves_nobody_behind(server: ServerProcess) -> None:
    """Ends the server of this module, so it is the last test."""
    children = worker_pids(server) | {server.engine_pid}
    server.signal(signal.SIGKILL)
    server.wait()
    wait_until("all gone", lambda: not any(map(is_alive, children)))
