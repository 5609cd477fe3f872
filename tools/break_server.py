"""Sends hostile requests to a server and checks what every one of them is owed.

    python -m tools.break_server --port 8000 [--count 2000] [--seed 0]

Each answer has a status below 500 and, from 400 on, the one error shape; whatever is left
unanswered had not been asked in full. Meanwhile two streams run: their text must come to its end,
and the 99th percentile of the times between their chunks is printed beside that of a quiet server.
Prints a line of JSON; exits with 1 when anything was not as it is owed. Only for servers on this
machine: it connects to 127.0.0.1.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import random
import socket
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, field

from tools.hostile_requests import Hostile, completion, hostile_requests, request

HOST = "127.0.0.1"
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Answer:
    """`headers`: names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


def send(port: int, hostile: Hostile) -> bytes:
    """Everything the server sends until it, or the request's `ends`, closes the connection."""
    with socket.create_connection((HOST, port), TIMEOUT_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        received = b""
        try:
            for part in hostile.parts:
                connection.sendall(part)
            if hostile.ends == "close":
                return b""
            if hostile.ends == "reset":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                return b""
            if hostile.ends == "half_close":
                connection.shutdown(socket.SHUT_WR)
            while data := connection.recv(1 << 16):
                received += data
        except (ConnectionResetError, BrokenPipeError):
            pass  # refused in the middle of a flood
        return received


def answers(raw: bytes, head: bool = False) -> list[Answer]:
    """Takes apart what a server sent on one connection. AssertionError if it is not HTTP.

    `head`: the answers are to HEAD and have no bodies.
    """
    found = []
    while raw:
        top, end, raw = raw.partition(b"\r\n\r\n")
        assert end, f"a head without an end: {top[:200]!r}"
        lines = top.split(b"\r\n")
        version, status, _ = lines[0].split(b" ", 2)
        assert version == b"HTTP/1.1", lines[0]
        if status.startswith(b"1"):
            continue
        headers = {}
        for line in lines[1:]:
            name, _, value = line.decode("latin-1").partition(": ")
            headers[name.lower()] = value
        body = b""
        if head:
            pass
        elif headers.get("transfer-encoding") == "chunked":
            while True:
                size, _, raw = raw.partition(b"\r\n")
                part, raw = raw[: int(size, 16)], raw[int(size, 16) + 2 :]
                if not part:
                    break
                body += part
        elif "content-length" in headers:
            length = int(headers["content-length"])
            assert len(raw) >= length, "a body cut short"
            body, raw = raw[:length], raw[length:]
        else:
            body, raw = raw, b""
        found.append(Answer(int(status), headers, body))
    return found


def complaint(hostile: Hostile, raw: bytes) -> str | None:
    """What is wrong with the answers, or None."""
    try:
        got = answers(raw, head=hostile.parts[0].startswith(b"HEAD"))
    except (AssertionError, ValueError) as error:
        return f"{error!r}"
    for answer in got:
        if answer.status >= 500:
            return f"{answer.status} {answer.body[:200]!r}"
        if hostile.statuses and answer.status not in hostile.statuses:
            return f"{answer.status}, wanted {sorted(hostile.statuses)}"
        if answer.status >= 400 and not hostile.parts[0].startswith(b"HEAD"):
            try:
                fields = json.loads(answer.body)["error"]
                if set(fields) != {"message", "type", "param", "code"}:
                    return f"error fields {sorted(fields)}"
            except (ValueError, KeyError, TypeError):
                return f"{answer.status} without the error shape: {answer.body[:200]!r}"
            if "x-request-id" not in answer.headers:
                return f"{answer.status} without a request id"
    return None


class Stream(threading.Thread):
    """A client that reads a stream of `max_tokens` and notes when its chunks came."""

    def __init__(self, port: int, model: str, max_tokens: int) -> None:
        super().__init__(daemon=True)
        fields = {"stream": True, "max_tokens": max_tokens, "ignore_eos": True, "temperature": 0}
        body = completion(model, **fields)
        self._port = port
        self._request = request(body)
        self.raw = b""
        self.times: list[float] = []
        self.start()

    def run(self) -> None:
        with socket.create_connection((HOST, self._port), TIMEOUT_S) as connection:
            connection.sendall(self._request)
            while data := connection.recv(1 << 16):
                self.raw += data
                self.times.append(time.monotonic())

    @property
    def text(self) -> str:
        """Of a stream that came to its end; AssertionError otherwise."""
        (answer,) = answers(self.raw)
        events = [line.removeprefix(b"data: ") for line in answer.body.split(b"\n\n") if line]
        assert events[-1] == b"[DONE]", events[-1]
        chunks = [json.loads(event) for event in events[:-1]]
        assert chunks[-1]["choices"][0]["finish_reason"] in ("length", "stop"), chunks[-1]
        return "".join(chunk["choices"][0]["text"] for chunk in chunks)

    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.times, self.times[1:], strict=False)]


@dataclass
class Report:
    num_requests: int = 0
    statuses: collections.Counter[int] = field(default_factory=collections.Counter)
    complaints: list[str] = field(default_factory=list)


def attack(port: int, requests: Iterator[Hostile], num_threads: int = 4) -> Report:
    """Sends them all, several at a time."""
    report = Report()

    def one(hostile: Hostile) -> tuple[Hostile, bytes]:
        return hostile, send(port, hostile)

    with ThreadPoolExecutor(num_threads) as pool:
        for hostile, raw in pool.map(one, requests):
            report.num_requests += 1
            wrong = complaint(hostile, raw)
            if wrong is not None:
                report.complaints.append(f"{hostile.name}: {wrong}")
            elif hostile.parts[0].startswith(b"HEAD"):
                continue
            else:
                report.statuses.update(answer.status for answer in answers(raw))
    return report


def _attack(port: int, model: str, count: int, seed: int) -> Report:
    os.nice(10)  # the server is to be short of nothing but what the requests take from it
    return attack(port, hostile_requests(random.Random(seed), model, count), num_threads=2)


def p99_ms(streams: list[Stream]) -> float:
    gaps = sorted(gap for stream in streams for gap in stream.gaps())
    return 1e3 * gaps[int(0.99 * (len(gaps) - 1))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--model", default="models/demo")
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=400, help="of the streams beside it")
    args = parser.parse_args()

    def streams() -> list[Stream]:
        return [Stream(args.port, args.model, args.max_tokens) for _ in range(2)]

    quiet = streams()
    for stream in quiet:
        stream.join()
    began = time.monotonic()
    disturbed = streams()
    with ProcessPoolExecutor(1) as pool:  # of its own, so that the streams' clocks are not held up
        report = pool.submit(_attack, args.port, args.model, args.count, args.seed).result()
    seconds = time.monotonic() - began
    for stream in disturbed:
        stream.join()
    texts = {stream.text for stream in quiet + disturbed}
    print(
        json.dumps(
            {
                "requests": report.num_requests,
                "seconds": round(seconds, 1),
                "statuses": dict(sorted(report.statuses.items())),
                "complaints": report.complaints[:20],
                "different_texts": len(texts),
                "p99_quiet_ms": round(p99_ms(quiet), 2),
                "p99_disturbed_ms": round(p99_ms(disturbed), 2),
            }
        )
    )
    return 1 if report.complaints or len(texts) > 1 else 0


if __name__ == "__main__":
    sys.exit(main())
