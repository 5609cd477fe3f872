"""Malformed, hostile and slow clients over raw sockets: each gets what it is owed, and nobody else
notices. `tools/break_server.py` sends more of the same to a server and takes times."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from starlette.types import Receive, Scope, Send

from deltaserve.server.http_protocol import HttpProtocol
from tools.break_server import Answer, Stream, answers, attack, send
from tools.hostile_requests import Hostile, completion, hostile_requests, request

from .scripted_engine import ENDLESS, output_id
from .server_process import ServerProcess, start_scripted, wait_until

COMPLETION = completion("scripted")
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("hostile")
    (directory / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ m.role + m.content + (m.name or '') }}{% endfor %}{{ tools }}"
    )
    started = start_scripted(
        directory,
        step_s=0.002,
        max_running=8,
        max_queue=64,
        max_model_len=8192,
        receive_timeout=1.0,
    )
    yield started.wait_ready()
    started.stop()


def exchange(server: ServerProcess, *parts: bytes, ends: str = "read") -> list[Answer]:
    return answers(send(server.port, Hostile("", parts, ends)))  # type: ignore[arg-type]


def error_of(answer: Answer) -> str:
    error = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    message = error["message"]
    assert isinstance(message, str)
    return message


def test_hostile_requests_get_no_5xx_and_disturb_nothing(server: ServerProcess) -> None:
    streams = [Stream(server.port, "scripted", 1000 + n) for n in range(2)]
    wait_until("begun", lambda: all(stream.raw for stream in streams))
    requests = hostile_requests(random.Random(20), "scripted", 400)
    report = attack(server.port, requests)
    assert report.complaints == []
    assert report.num_requests == 400
    assert "POST /v1/chat/completions 200 " in server.log()
    assert min(report.statuses[status] for status in (200, 400, 404, 405, 413, 431)) > 0
    for n, stream in enumerate(streams):
        stream.join(60)
        assert stream.text == "".join(chr(output_id([50], i)) for i in range(1000 + n))
    wait_until("nothing left", server.is_idle)
    assert "Traceback" not in server.log()


@pytest.mark.parametrize(
    ("raw", "status", "message"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00", 400, "not a valid HTTP request"),
        (b"GET /\r\n\r\n", 400, "HTTP/0.9 is not spoken here"),
        (b"GET http://[::1/health HTTP/1.1\r\n\r\n", 400, "request target"),
        (HEAD + b"X: " + b"a" * 200_000, 431, "headers are larger than 65536 bytes"),
        (HEAD + b"A: b\r\n" * 200 + b"\r\n", 431, "more than 128 headers"),
        (b"GET /" + b"a" * 200_000, 431, "headers are larger"),
    ],
    ids=["tls", "no version", "target", "endless header", "many headers", "endless target"],
)
def test_what_is_no_request_is_refused_in_the_one_error_shape(
    server: ServerProcess, raw: bytes, status: int, message: str
) -> None:
    (answer,) = exchange(server, raw)
    assert answer.status == status
    assert message in error_of(answer)
    assert answer.headers["connection"] == "close"
    line = f"id={answer.headers['x-request-id']}"
    wait_until("logged", lambda: line in server.log())


@pytest.mark.parametrize("later", [False, True], ids=["one part", "body later"])
@pytest.mark.parametrize("chunked", [False, True], ids=["length", "chunked"])
def test_an_upgrade_is_ignored_and_its_body_read(
    server: ServerProcess, later: bool, chunked: bool
) -> None:
    framing, body = b"Content-Length: %d" % len(COMPLETION), COMPLETION
    if chunked:
        framing, body = b"Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    head = HEAD + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n" + framing + b"\r\n\r\n"
    then = request(b"", method="GET", path="/health")
    got = exchange(server, *((head, body, then) if later else (head + body + then,)))
    assert [answer.status for answer in got] == [200, 200]
    assert json.loads(got[0].body)["usage"]["completion_tokens"] == 1


def test_an_upgrade_with_a_coding_that_is_none(server: ServerProcess) -> None:
    head = HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\nTransfer-Encoding: gzip\r\n\r\n"
    assert [answer.status for answer in exchange(server, head + b"x")] == [400]


def test_a_body_that_is_none_is_refused_at_once(server: ServerProcess) -> None:
    good = b"%x\r\n%b\r\n" % (len(COMPLETION), COMPLETION)
    for chunks in (b"zz\r\n", good + b"-1\r\n", good + b"0\r\nno colon\r\n\r\n"):
        (answer,) = exchange(server, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunks)
        assert answer.status == 400
        assert "not a valid HTTP request" in error_of(answer)


@pytest.mark.parametrize("last", [b"x: ", b"5;"], ids=["trailer", "extension"])
def test_what_frames_a_body_has_a_size(server: ServerProcess, last: bytes) -> None:
    """A field is put together from its parts, over and over, for as long as it grows."""
    chunks = b"1\r\n \r\n" * 30_000 + (b"0\r\n" if last == b"x: " else b"") + last
    head = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
    (answer,) = exchange(server, head + chunks, *[b"y" * 65536] * 20)
    assert answer.status == 431
    assert "headers are larger than 65536 bytes" in error_of(answer)


def test_a_turn_of_the_event_loop_parses_a_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body may come in chunks of a byte, each of which costs what a long one does."""
    body = b" " * 100_000 + COMPLETION
    framed = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    received = b""
    sizes: list[int] = []
    feed = HttpProtocol._feed

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal received
        while (message := await receive())["type"] == "http.request":
            received += message["body"]
            if not message["more_body"]:
                break
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body"})

    def noting(protocol: HttpProtocol, piece: bytes) -> int:
        sizes[-1] += len(piece)
        return feed(protocol, piece)

    async def serve_one() -> bytes:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        with theirs:
            theirs.setblocking(False)
            await loop.create_connection(lambda: HttpProtocol(application, set(), set()), sock=ours)
            monkeypatch.setattr(HttpProtocol, "_feed", noting)

            def tick() -> None:
                sizes.append(0)
                loop.call_soon(tick)

            tick()
            await loop.sock_sendall(theirs, HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + framed)
            theirs.shutdown(socket.SHUT_WR)
            answer = b""
            while data := await loop.sock_recv(theirs, 1 << 16):
                answer += data
            return answer

    answer = asyncio.run(serve_one())
    assert answer.rpartition(b"HTTP/1.1 ")[2].startswith(b"204 ")
    assert received == body
    assert 0 < max(sizes) <= 1 << 15


@pytest.mark.parametrize("count", [2, 5])
def test_a_client_that_ends_its_side_gets_all_its_answers(
    server: ServerProcess, count: int
) -> None:
    """Also to what has not been parsed yet."""
    body = completion("scripted", max_tokens=50, user="x" * 50_000)
    got = exchange(server, request(body, close=False) * count, ends="half_close")
    assert [answer.status for answer in got] == [200] * count


def test_pipelined_requests_are_answered_in_order(server: ServerProcess) -> None:
    bodies = [completion("scripted", max_tokens=1 + n % 7) for n in range(100)]
    parts = [request(body, close=False) for body in bodies] + [request(b"{")]
    got = exchange(server, b"".join(parts))
    assert [answer.status for answer in got] == [200] * 100 + [400]
    counts = [json.loads(answer.body)["usage"]["completion_tokens"] for answer in got[:-1]]
    assert counts == [1 + n % 7 for n in range(100)]


def test_what_comes_before_garbage_is_answered_first(server: ServerProcess) -> None:
    got = exchange(server, request(COMPLETION, close=False) + b"\x00garbage\r\n\r\n")
    assert [answer.status for answer in got] == [200, 400]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_ends_its_side_gets_its_answer(server: ServerProcess, stream: bool) -> None:
    body = completion("scripted", max_tokens=50, stream=stream)
    (answer,) = exchange(server, request(body, close=False), ends="half_close")
    assert answer.status == 200
    assert b'"finish_reason":"length"' in answer.body


def test_a_client_that_leaves_pipelined_requests_is_noticed(server: ServerProcess) -> None:
    body = completion("scripted", prompt=[ENDLESS])
    exchange_ = socket.create_connection(("127.0.0.1", server.port))
    exchange_.sendall(request(body, close=False) * 3)
    wait_until("running", lambda: server.metrics()["vllm:num_requests_running"] == 1)
    exchange_.close()
    wait_until("freed", server.is_idle)


def test_a_refused_upload_can_read_why(server: ServerProcess) -> None:
    """The answer comes while the client is still sending, and is not lost to a reset."""
    (answer,) = exchange(server, HEAD + b"Content-Length: 8000000\r\n\r\n", b"x" * 8_000_000)
    assert answer.status == 413
    assert "larger than 100000 bytes" in error_of(answer)


def test_http_1_0_gets_no_chunks(server: ServerProcess) -> None:
    body = completion("scripted", stream=True, max_tokens=3)
    head = HEAD.replace(b"HTTP/1.1", b"HTTP/1.0") + b"Content-Length: %d\r\n\r\n" % len(body)
    (answer,) = exchange(server, head + body)
    assert "transfer-encoding" not in answer.headers
    assert answer.body.startswith(b"data: {") and answer.body.endswith(b"data: [DONE]\n\n")


def test_expect_continue(server: ServerProcess) -> None:
    head = HEAD + b"Connection: close\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head % len(COMPLETION))
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(COMPLETION)
        assert connection.recv(100).startswith(b"HTTP/1.1 200 OK\r\n")


def drip(server: ServerProcess) -> bytes:
    """A byte now and then is no progress: the deadline is the whole head's."""
    with socket.create_connection(("127.0.0.1", server.port), 60) as connection:
        connection.settimeout(0.05)
        connection.sendall(HEAD + b"X: ")
        received = b""
        while not received:
            connection.sendall(b"A")
            with contextlib.suppress(TimeoutError):
                received = connection.recv(1000)
        return received


UNFINISHED = {
    "head": (HEAD, "no whole head within 1 s"),
    "first byte": (b"P", "no whole head within 1 s"),
    "body": (HEAD + b"Content-Length: 50\r\n\r\n{", "the body came too slowly: 1 bytes"),
    "chunk": (
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;",
        "the body came too slowly: 0 bytes",
    ),
}


@pytest.fixture(scope="module")
def given_up(server: ServerProcess) -> Iterator[dict[str, Future[bytes]]]:
    """What the server sends on connections that come to nothing, all waiting at the same time."""
    with ThreadPoolExecutor() as threads:
        unfinished = {name: Hostile("", (sent,)) for name, (sent, _) in UNFINISHED.items()}
        unfinished["nothing"] = Hostile("", ())
        futures = {
            name: threads.submit(send, server.port, hostile) for name, hostile in unfinished.items()
        }
        yield {**futures, "drip": threads.submit(drip, server)}


@pytest.mark.parametrize("name", UNFINISHED)
def test_a_request_that_does_not_come_is_given_up(
    given_up: dict[str, Future[bytes]], name: str
) -> None:
    (answer,) = answers(given_up[name].result())
    assert answer.status == 408
    assert UNFINISHED[name][1] in error_of(answer)


def test_a_connection_that_says_nothing_is_closed(given_up: dict[str, Future[bytes]]) -> None:
    assert given_up["nothing"].result() == b""


def test_dripping_headers_do_not_keep_a_connection(given_up: dict[str, Future[bytes]]) -> None:
    assert given_up["drip"].result().startswith(b"HTTP/1.1 408 ")


def test_memory_is_bounded_while_heads_flood(server: ServerProcess) -> None:
    def resident_kb() -> int:
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0])

    before = resident_kb()
    flood = Hostile("", tuple([HEAD + b"X: "] + [b"a" * 65536] * 200))
    for _ in range(5):
        (answer,) = answers(send(server.port, flood))
        assert answer.status == 431
    assert resident_kb() - before < 20_000  # of 65,000 sent
