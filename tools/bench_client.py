"""A small HTTP/1.1 client for load tests: a POST, and when each part of its answer came.

Owns connections, their reuse and the chunked transfer encoding. What is in the bytes is
`bench_answers`': they are kept while a run lasts and read after it, so that one thread keeps up
with thousands of events a second. Standard library alone.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit


@dataclass
class Answer:
    """What came back. Times are `time.perf_counter()`; `pieces` are (time, bytes) of the body."""

    started: float
    ended: float = 0.0
    status: int = 0
    pieces: list[tuple[float, bytes]] = field(default_factory=list)
    error: str | None = None

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.pieces)


class Client:
    """Requests to one server, over as many kept connections as there are at once."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 600.0) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: expected http://HOST:PORT, got {url!r}")
        self._host = parts.hostname
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        self._base = parts.path.rstrip("/")
        self._timeout = timeout
        self._idle: list[_Connection] = []
        authorization = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._headers = f"Host: {parts.netloc}\r\nContent-Type: application/json\r\n{authorization}"

    async def post(self, path: str, body: bytes) -> Answer:
        """The answer of a POST, also if it failed: `error` says how. Does not raise OSError."""
        length = f"Content-Length: {len(body)}\r\n\r\n"
        head = f"POST {self._base}{path} HTTP/1.1\r\n{self._headers}{length}"
        answer = Answer(time.perf_counter())
        try:
            async with asyncio.timeout(self._timeout):
                await self._exchange(head.encode() + body, answer)
        except TimeoutError:
            answer.error = f"no end within {self._timeout:g} s"
        except OSError as error:
            answer.error = f"{type(error).__name__}: {error}"
        answer.ended = answer.ended or time.perf_counter()
        return answer

    async def _exchange(self, request: bytes, answer: Answer) -> None:
        """A kept connection that the server closed in the meantime is replaced by a new one."""
        while True:
            reused = bool(self._idle)
            connection = self._idle.pop() if reused else await self._connect()
            try:
                await connection.exchange(request, answer)
            except ConnectionError:
                if reused and not answer.status:
                    continue
                raise
            finally:
                if connection.reusable:
                    self._idle.append(connection)
                else:
                    connection.close()
            return

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            _Connection, self._host, self._port, ssl=self._ssl
        )
        return connection

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


class _Connection(asyncio.Protocol):
    """One exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._done: asyncio.Future[None] | None = None
        self._unread = b""
        self._chunked = False
        self._left: int | None = None  # of a body of known length
        self._keeps = False  # the server's word about the connection
        self.reusable = False

    async def exchange(self, request: bytes, answer: Answer) -> None:
        """Raises ConnectionError when the connection ends before the answer does."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionResetError("the connection was closed")
        self.reusable = False
        self._answer, self._unread = answer, b""
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._done

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self.reusable = False
        self._transport = None
        if self._done is None or self._done.done():
            return
        if self._answer is not None and self._answer.status and self._until_close():
            self._finish(time.perf_counter())
            return
        self._done.set_exception(ConnectionResetError("the connection ended before the answer did"))

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        answer = self._answer
        if answer is None or self._done is None or self._done.done():
            self.close()  # bytes that nobody asked for
            return
        data = self._unread + data if self._unread else data
        self._unread = b""
        if not answer.status:
            end = data.find(b"\r\n\r\n")
            if end < 0:
                self._unread = data
                return
            self._read_head(data[:end], answer)
            data = data[end + 4 :]
        if self._chunked:
            self._read_chunks(data, now, answer)
            return
        if data:
            answer.pieces.append((now, data))
        if self._left is not None:
            self._left -= len(data)
            if self._left <= 0:
                self.reusable = self._keeps
                self._finish(now)

    def _until_close(self) -> bool:
        return not self._chunked and self._left is None

    def _read_head(self, head: bytes, answer: Answer) -> None:
        status, *lines = head.split(b"\r\n")
        answer.status = int(status.split(b" ", 2)[1])
        headers = {}
        for line in lines:
            name, _, value = line.partition(b":")
            headers[name.strip().lower()] = value.strip().lower()
        self._chunked = headers.get(b"transfer-encoding") == b"chunked"
        length = headers.get(b"content-length")
        self._left = int(length) if length is not None else None
        self._keeps = headers.get(b"connection") != b"close"

    def _read_chunks(self, data: bytes, now: float, answer: Answer) -> None:
        """Whole chunks go to the answer, a part of one waits for the rest."""
        begin = 0
        while True:
            line_end = data.find(b"\r\n", begin)
            if line_end < 0:
                break
            size = int(data[begin:line_end].partition(b";")[0], 16)
            end = line_end + 2 + size
            if len(data) < end + 2:
                break
            if size == 0:
                self.reusable = self._keeps
                self._finish(now)
                return
            answer.pieces.append((now, data[line_end + 2 : end]))
            begin = end + 2
        self._unread = data[begin:]

    def _finish(self, now: float) -> None:
        assert self._done is not None and self._answer is not None
        self._answer.ended = now
        self._done.set_result(None)
