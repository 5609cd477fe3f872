"""Clients that leave or do not read: nothing of theirs stays in the engine, in whatever state."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator

import pytest

from .scripted_engine import ENDLESS, output_id
from .server_process import ServerProcess, start_scripted, wait_until

LONG = 400  # tokens: seconds at the scripted pace, longer than any of these tests needs


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    started = start_scripted(
        tmp_path_factory.mktemp("disconnect"), step_s=0.02, max_running=1, max_queue=2
    )
    yield started.wait_ready()
    started.stop()


def send(server: ServerProcess, prompt: list[int], max_tokens: int, stream: bool) -> socket.socket:
    """An open connection on which the whole request was sent."""
    body = json.dumps(
        {"model": "scripted", "prompt": prompt, "max_tokens": max_tokens, "stream": stream}
    )
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(
        f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"X-Request-Id: {'i' * 128}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    return connection


def wait_for(server: ServerProcess, running: int, waiting: int) -> None:
    def reached() -> bool:
        values = server.metrics()
        return (
            values["vllm:num_requests_running"] == running
            and values["vllm:num_requests_waiting"] == waiting
        )

    wait_until(f"{running} running, {waiting} waiting", reached)


def leave(connection: socket.socket, how: str) -> None:
    if how == "reset":
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()


streams = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


@streams
@pytest.mark.parametrize("how", ["close", "reset"])
def test_leaving_while_decoding(server: ServerProcess, stream: bool, how: str) -> None:
    before = server.metrics()
    connection = send(server, [50], LONG, stream)
    if stream:
        received = b""
        while received.count(b"data: ") < 2:
            received += connection.recv(65536)
    else:
        decoded = before["vllm:generation_tokens_total"] + 2
        wait_until("decoding", lambda: server.metrics()["vllm:generation_tokens_total"] >= decoded)
    leave(connection, how)
    wait_until("freed", server.is_idle)
    aborted = "vllm:request_success_total:abort"
    assert server.metrics()[aborted] == before[aborted] + 1


@streams
def test_leaving_in_prefill(server: ServerProcess, stream: bool) -> None:
    connection = send(server, [ENDLESS], LONG, stream)
    wait_for(server, running=1, waiting=0)
    leave(connection, "close")
    wait_until("freed", server.is_idle)


@streams
def test_leaving_the_queue(server: ServerProcess, stream: bool) -> None:
    first = send(server, [ENDLESS], LONG, stream)
    wait_for(server, running=1, waiting=0)
    second = send(server, [50], LONG, stream)
    wait_for(server, running=1, waiting=1)
    leave(second, "close")
    wait_for(server, running=1, waiting=0)
    leave(first, "close")
    wait_until("freed", server.is_idle)


def test_leaving_in_the_middle_of_the_body(server: ServerProcess) -> None:
    connection = socket.create_connection(("127.0.0.1", server.port))
    connection.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b'X-Request-Id: cut-short\r\nContent-Length: 1000\r\n\r\n{"model"'
    )
    leave(connection, "close")
    wait_until("logged", lambda: "/v1/completions 499" in _line(server, "cut-short"))
    assert "Traceback" not in server.log()


def _line(server: ServerProcess, request_id: str) -> str:
    return next((line for line in server.log().splitlines() if f"id={request_id}" in line), "")


def test_a_full_queue_is_429_and_others_go_on(server: ServerProcess) -> None:
    connections = [send(server, [ENDLESS], LONG, False)]
    wait_for(server, running=1, waiting=0)
    connections += [send(server, [50], LONG, False) for _ in range(2)]
    wait_for(server, running=1, waiting=2)
    response = server.complete(model="scripted", prompt="a")
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert response.json()["error"]["code"] == "queue_full"
    wait_for(server, running=1, waiting=2)
    for connection in connections:
        leave(connection, "close")
    wait_until("freed", server.is_idle)
    assert server.complete(model="scripted", prompt="a", max_tokens=1).status_code == 200


def test_a_reader_that_does_not_read_holds_nothing_up(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Its tokens wait merged; the engine finishes the request long before it is read."""
    num_tokens = 6_000
    server = start_scripted(tmp_path_factory.mktemp("slow"), max_model_len=num_tokens + 1)
    try:
        server.wait_ready()
        connection = send(server, [50], num_tokens, True)
        finished = "vllm:request_success_total:length"
        wait_until("finished unread", lambda: server.metrics()[finished] == 1)
        assert server.is_idle()
        raw = b""
        while not raw.endswith(b"\r\n0\r\n\r\n"):
            raw += connection.recv(1 << 20)
        connection.close()
    finally:
        server.stop()
    lines = [line for line in raw.split(b"\r\n") if line.startswith(b"data: {")]
    texts = [json.loads(line.removeprefix(b"data: "))["choices"][0]["text"] for line in lines]
    assert "".join(texts) == "".join(chr(output_id([50], n)) for n in range(num_tokens))
    assert len(texts) < num_tokens
