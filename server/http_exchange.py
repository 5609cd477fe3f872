"""HttpExchange: one request on a connection and its response, as ASGI sees them.

Owns the request's body on its way to the application and the bytes of the response. Parsing,
limits and the connection's life are http_protocol's.
"""

from __future__ import annotations

import asyncio
import http
import logging
import time
import urllib.parse
from email.utils import formatdate
from typing import Any, Protocol

import msgspec
from starlette.types import ASGIApp, Message, Scope

from .errors import ApiError

logger = logging.getLogger("deltaserve")

_STATUS_LINES = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode()
    for status in http.HTTPStatus
}
_EVENT_STREAM = b"text/event-stream"
_date = (0, b"")


class Connection(Protocol):
    """What an exchange needs of its connection."""

    @property
    def writable(self) -> bool:
        """Whether the socket takes more without keeping it for later."""

    async def drain(self) -> None:
        """Returns when it does."""

    def write(self, data: bytes) -> None: ...

    def resume_body(self) -> None:
        """The application has taken what had come of the body."""

    def finished(self, exchange: HttpExchange) -> None:
        """The application has returned; the response is complete unless the client has gone."""


class HttpExchange:
    """`keep_alive`: whether the connection may serve another request after this one."""

    def __init__(
        self, connection: Connection, scope: Scope, *, keep_alive: bool, expects_continue: bool
    ) -> None:
        self.scope = scope
        self.keep_alive = keep_alive
        self.body_ended = False
        self.response_complete = False
        self._connection = connection
        self._expects_continue = expects_continue
        self._disconnected = False
        self._body = bytearray()
        self._body_delivered = False
        self._changed = asyncio.Event()
        self._head: bytes | None = None  # held back to leave in one write with the body
        self.started = False
        self._chunked = False
        self._is_event_stream = False

    # ---- from the connection ---------------------------------------------------------------------

    def push_body(self, data: bytes) -> None:
        if not self.response_complete:
            self._body += data
            self._changed.set()

    @property
    def num_waiting(self) -> int:
        """Bytes of the body that wait for the application."""
        return len(self._body)

    def end_body(self) -> None:
        self.body_ended = True
        self._changed.set()

    def disconnect(self) -> None:
        self._disconnected = True
        self._changed.set()

    def probe(self) -> bool:
        """Writes something without a meaning, which a peer that is wholly gone answers with a
        reset. False if there is nothing that could be written here."""
        if self._is_event_stream:
            self._connection.write(self._framed(b":\n\n"))
        elif not self.started and self.scope["http_version"] == "1.1":
            self._connection.write(b"HTTP/1.1 102 Processing\r\n\r\n")
        else:
            return False
        return True

    async def run(self, app: ASGIApp) -> None:
        try:
            await app(self.scope, self.receive, self.send)
            assert self.response_complete or self._disconnected, "no complete response"
        except Exception:
            logger.exception("the application failed")
            self.keep_alive = False
        finally:
            self._connection.finished(self)

    # ---- ASGI ------------------------------------------------------------------------------------

    async def receive(self) -> Message:
        if self._expects_continue and not self.started:
            self._expects_continue = False
            if not self._body and not self.body_ended:
                self._connection.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while True:
            if self._disconnected or self.response_complete:
                return {"type": "http.disconnect"}
            if self._body or (self.body_ended and not self._body_delivered):
                body = bytes(self._body)
                self._body.clear()
                self._body_delivered = self.body_ended
                self._connection.resume_body()
                return {"type": "http.request", "body": body, "more_body": not self.body_ended}
            self._changed.clear()
            await self._changed.wait()

    async def send(self, message: Message) -> None:
        """Nothing is sent to a client that has gone."""
        if not self._connection.writable:
            await self._connection.drain()
        if self._disconnected:
            return
        if message["type"] == "http.response.start":
            assert not self.started
            self._start(message["status"], list(message.get("headers", ())))
            return
        assert self.started and not self.response_complete
        ended = not message.get("more_body", False)
        body = b"" if self.scope["method"] == "HEAD" else message.get("body", b"")
        if self._chunked:
            body = self._framed(body) + (b"0\r\n\r\n" if ended else b"")
        if self._head is not None:
            body, self._head = self._head + body, None
        if body:
            self._connection.write(body)
        if ended:
            self.response_complete = True
            self._changed.set()

    def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        fields = {name.lower(): value for name, value in headers}
        self._is_event_stream = fields.get(b"content-type", b"").startswith(_EVENT_STREAM)
        has_length = b"content-length" in fields
        if not has_length and self.scope["method"] != "HEAD" and status not in (204, 304):
            self._chunked = self.scope["http_version"] == "1.1"
            if self._chunked:
                headers.append((b"transfer-encoding", b"chunked"))
            else:
                self.keep_alive = False  # the end of the connection ends the body
        if fields.get(b"connection") == b"close":
            self.keep_alive = False
        elif not self.keep_alive or not self.body_ended:
            self.keep_alive = False  # what is left of an unwanted body is not read
            headers.append((b"connection", b"close"))
        head = response_head(status, headers)
        if has_length:
            self._head = head
        else:
            self._connection.write(head)

    def _framed(self, data: bytes) -> bytes:
        return b"%x\r\n%b\r\n" % (len(data), data) if data and self._chunked else data


def response_head(status: int, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Up to and with the empty line; adds the date."""
    parts: list[bytes] = [_STATUS_LINES[status], b"date: ", _http_date(), b"\r\n"]
    for name, value in headers:
        parts += (name, b": ", value, b"\r\n")
    parts.append(b"\r\n")
    head = b"".join(parts)
    num_lines = len(headers) + 3
    assert head.count(b"\n") == num_lines and head.count(b"\r") == num_lines, "a forged header"
    return head


def error_response(error: ApiError, request_id: str) -> bytes:
    """The whole answer to what never became a request; the connection is closed after it."""
    body = msgspec.json.encode(error.body())
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
        (b"x-request-id", request_id.encode()),
    ]
    return response_head(error.status, headers) + body


def _http_date() -> bytes:
    global _date
    now = int(time.time())
    if _date[0] != now:
        _date = (now, formatdate(now, usegmt=True).encode())
    return _date[1]


def http_scope(
    method: str,
    target: bytes,
    http_version: str,
    headers: list[tuple[bytes, bytes]],
    connection: dict[str, Any],
) -> Scope:
    """`connection`: the scope's client, server and scheme. Raises ValueError for a bad target."""
    raw_path, _, query = target.partition(b"?")
    if not target.startswith(b"/"):  # absolute form, or the forms of OPTIONS and CONNECT
        split = urllib.parse.urlsplit(target)
        if split.scheme in (b"http", b"https"):
            raw_path, query = split.path or b"/", split.query
    path = raw_path.decode("ascii")
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": http_version,
        "method": method,
        "path": urllib.parse.unquote(path) if "%" in path else path,
        "raw_path": raw_path,
        "query_string": query,
        "root_path": "",
        "headers": headers,
        "state": {},
        **connection,
    }
