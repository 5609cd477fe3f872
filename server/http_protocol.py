"""HttpProtocol: one client connection. HTTP/1.1 by llhttp (httptools) to ASGI, and its limits.

    bytes -> parser -> exchanges: [running, next]; what comes after those waits unparsed

A connection parses a little at a time, then others have their turn. Each has a deadline unless it
works for a request: for a head, and between requests. (The body's is its reader's.) A head has a
size, and so has what frames a body; what the parser refuses is answered in the shape of
all errors, after what came before it. A client that stops sending after its request still gets its
answer; one that has gone is seen by what its host says to a probe.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from typing import Any, cast

import httptools
from starlette.types import ASGIApp

from . import tcp
from .deadline import Deadline
from .errors import ApiError
from .http_exchange import HttpExchange, error_response, http_scope

logger = logging.getLogger("deltaserve")

MAX_HEAD_BYTES = 64 << 10
MAX_HEADERS = 128
HEAD_TIMEOUT_S = 30.0
KEEP_ALIVE_S = 75.0  # longer than clients', so that they close first
LINGER_S = 2.0  # an answer can be read while its request is still being sent
MAX_UNREAD = 64 << 10  # bytes taken from the socket ahead of what is worked on
_PIECE = 4096  # bytes parsed at a time: how far over the limits a client can get
_TURN = 4 * _PIECE  # and in one turn of the event loop: it may be chunks of one byte each


class HttpProtocol(asyncio.Protocol):
    """`connections` holds every open one; `tasks` the running exchanges."""

    def __init__(
        self,
        app: ASGIApp,
        connections: set[HttpProtocol],
        tasks: set[asyncio.Task[None]],
        head_timeout: float = HEAD_TIMEOUT_S,
    ) -> None:
        self._app = app
        self._connections = connections
        self._tasks = tasks
        self._head_timeout = head_timeout
        self._loop = asyncio.get_running_loop()
        self._exchanges: deque[HttpExchange] = deque()  # the first runs
        self._incoming: HttpExchange | None = None  # the one whose body is being read
        self._unparsed = b""
        self._refusal: ApiError | None = None
        self._in_head = False
        self._awaits_head = False  # with the deadline of a head
        self._framing_bytes = 0  # of a head, of chunk sizes, of trailers: since the last of a body
        self._ended = False  # nothing more is read: the last request, an error, or the client's end
        self._half_closed = False
        self._reading = True
        self.writable = True
        self._drained = asyncio.Event()
        self._deadline = Deadline(self._loop)
        self._ignore_head = False  # of a parser that replaces one which met an Upgrade
        self._new_parser()

    # ---- the transport ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._connections.add(self)
        sock = transport.get_extra_info("socket")
        self._is_tcp = tcp.is_tcp(sock)
        if self._is_tcp:
            tcp.probe_when_idle(sock)
        self._is_tls = transport.get_extra_info("sslcontext") is not None
        self._scope: dict[str, Any] = {
            "client": tcp.address(transport.get_extra_info("peername")),
            "server": tcp.address(transport.get_extra_info("sockname")),
            "scheme": "https" if self._is_tls else "http",
        }
        self._deadline.set(self._head_timeout, self._too_late)

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        self._ended = True
        self._deadline.clear()
        for exchange in self._exchanges:
            exchange.disconnect()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._ended:
            return
        if self._unparsed:
            self._unparsed += data
            self._pause_if_full()
        else:
            self._parse(data)

    def eof_received(self) -> bool:
        """Whether to keep the connection, for the answers to requests that are complete."""
        if self._is_tls or not (self._unparsed or self._owes_answers_alone()):
            return False
        if self._exchanges and not self._exchanges[0].probe():
            return False
        self._half_closed = True
        self._ended = not self._unparsed
        if self._is_tcp:
            tcp.abort_when_reset(self._loop, self._transport, 0.002)
        return True

    def pause_writing(self) -> None:
        self.writable = False
        self._drained.clear()

    def resume_writing(self) -> None:
        self.writable = True
        self._drained.set()

    async def drain(self) -> None:
        await self._drained.wait()

    def write(self, data: bytes) -> None:
        self._transport.write(data)

    def resume_body(self) -> None:
        self._pause_if_full()

    def finished(self, exchange: HttpExchange) -> None:
        assert self._exchanges[0] is exchange
        self._exchanges.popleft()
        if self._transport.is_closing():
            return
        if exchange.started and not exchange.response_complete:
            self._transport.abort()  # the client must not take half an answer for a whole one
        elif exchange.started and not exchange.keep_alive:
            self._close(unread=not exchange.body_ended)
        elif self._exchanges:
            self._start(self._exchanges[0])
            self._parse_more()
        elif self._refusal is not None:
            self._answer_refusal()
        elif (self._half_closed and not self._unparsed) or not exchange.started:
            self._transport.close()
        else:
            seconds = self._head_timeout if self._in_head else KEEP_ALIVE_S
            self._deadline.set(seconds, self._too_late)
            self._awaits_head = self._in_head
            self._parse_more()

    # ---- for HttpServer --------------------------------------------------------------------------

    def shut_down(self) -> None:
        """Closes the connection now, or after the answers to what has been asked."""
        if self._exchanges:
            self._exchanges[-1].keep_alive = False
            self._ended = self._incoming is None
        else:
            self._transport.close()

    def abort(self) -> None:
        self._transport.abort()

    # ---- parsing ---------------------------------------------------------------------------------

    def _new_parser(self) -> None:
        self._parser = httptools.HttpRequestParser(self)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)

    def _parse_more(self) -> None:
        if self._unparsed and not self._ended:
            data, self._unparsed = self._unparsed, b""
            self._parse(data)
        self._pause_if_full()

    def _parse(self, data: bytes) -> None:
        """Takes `data` apart until a second request waits or others have their turn; the rest is
        kept."""
        offset = 0
        while offset < len(data) and not self._ended:
            waits = len(self._exchanges) > 1 and self._incoming is None
            if waits or offset >= _TURN:
                self._unparsed = data[offset:]
                self._pause_if_full()
                if not waits:
                    self._loop.call_soon(self._parse_more)
                break
            offset += self._feed(data[offset : offset + _PIECE])
        if self._in_head and not self._ended and not self._exchanges and not self._awaits_head:
            self._awaits_head = True  # and its deadline is not moved by more of the head
            self._deadline.set(self._head_timeout, self._too_late)
        if self._half_closed and not self._unparsed:
            self._ended = True
            if not self._owes_answers_alone():
                self._transport.close()  # the rest of the last request does not come

    def _owes_answers_alone(self) -> bool:
        """Whether answers are due, to whole requests alone."""
        return bool(self._exchanges) and self._incoming is None

    def _feed(self, piece: bytes) -> int:
        """Returns how much of `piece` has been parsed."""
        consumed = len(piece)
        try:
            try:
                self._parser.feed_data(piece)
            except httptools.HttpParserUpgrade as paused:
                consumed = paused.args[0]
                self._decline_upgrade()
        except httptools.HttpParserError as error:
            self._refuse(ApiError(400, f"not a valid HTTP request: {error}"))
        self._framing_bytes += consumed
        if self._framing_bytes > MAX_HEAD_BYTES:
            self._refuse(ApiError(431, f"the headers are larger than {MAX_HEAD_BYTES} bytes"))
        if self._refusal is not None:
            self._ended = True
            if self._incoming is not None:
                self._incoming.disconnect()  # its body will not come
            elif not self._exchanges:
                self._answer_refusal()
        return consumed

    def _decline_upgrade(self) -> None:
        """llhttp takes what follows such a head for another protocol; a new parser, for a body."""
        self._new_parser()
        headers = dict(self._incoming.scope["headers"]) if self._incoming else {}
        for name in (b"content-length", b"transfer-encoding"):
            if name in headers:
                self._ignore_head = True
                self._parser.feed_data(b"POST / HTTP/1.1\r\n%b: %b\r\n\r\n" % (name, headers[name]))
                return
        self.on_message_complete()

    def on_message_begin(self) -> None:
        if self._ignore_head:
            return
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._in_head = True
        self._framing_bytes = 0

    def on_url(self, url: bytes) -> None:
        if not self._ignore_head:
            self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._in_head:
            return  # trailers, which mean nothing here
        if len(self._headers) == MAX_HEADERS:
            self._refuse(ApiError(431, f"more than {MAX_HEADERS} headers"))
            return
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self._in_head = self._awaits_head = False
        if self._ignore_head:
            self._ignore_head = False
            return
        if self._refusal is not None or self._ended:
            return
        self._deadline.clear()
        method = self._parser.get_method().decode("ascii")
        version = self._parser.get_http_version()
        if version not in ("1.0", "1.1"):
            self._refuse(ApiError(400, f"HTTP/{version} is not spoken here, but HTTP/1.1"))
            return
        try:
            scope = http_scope(method, self._url, version, self._headers, self._scope)
        except ValueError:
            self._refuse(ApiError(400, "the request target is not a valid one"))
            return
        fields = dict(self._headers)
        exchange = HttpExchange(
            self,
            scope,
            keep_alive=version == "1.1"
            and method != "CONNECT"
            and b"close" not in fields.get(b"connection", b"").lower(),
            expects_continue=fields.get(b"expect", b"").lower() == b"100-continue",
        )
        self._incoming = exchange
        self._exchanges.append(exchange)
        if len(self._exchanges) == 1:
            self._start(exchange)

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        if self._incoming is not None:
            self._incoming.push_body(body)
            self._pause_if_full()

    def on_message_complete(self) -> None:
        exchange = self._incoming
        if exchange is None or self._parser.should_upgrade():  # its body is still to come
            return
        exchange.end_body()
        self._incoming = None
        self._ended = not exchange.keep_alive

    # ---- answering, waiting, closing -------------------------------------------------------------

    def _start(self, exchange: HttpExchange) -> None:
        self._deadline.clear()
        task = self._loop.create_task(exchange.run(self._app))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _refuse(self, error: ApiError) -> None:
        """The first one is sent, once the answers before it have been."""
        self._refusal = self._refusal or error

    def _answer_refusal(self) -> None:
        assert self._refusal is not None
        request_id = uuid.uuid4().hex
        logger.info("%d %s id=%s", self._refusal.status, self._refusal, request_id)
        self._transport.write(error_response(self._refusal, request_id))
        self._close(unread=True)

    def _close(self, unread: bool) -> None:
        """`unread`: the client may still be sending, and a reset would take the answer from it."""
        self._ended = True
        if not unread or self._is_tls:
            self._transport.close()
            return
        self._transport.write_eof()
        self._pause_if_full()
        self._deadline.set(LINGER_S, self._transport.close)

    def _pause_if_full(self) -> None:
        """What comes after the end is read and dropped, to see the client leave."""
        waiting = self._incoming.num_waiting if self._incoming is not None else 0
        read = self._ended or max(len(self._unparsed), waiting) <= MAX_UNREAD
        if read == self._reading or self._transport.is_closing():
            return
        self._reading = read
        (self._transport.resume_reading if read else self._transport.pause_reading)()

    def _too_late(self) -> None:
        if self._in_head and not (self._ended or self._transport.is_closing()):
            self._refuse(ApiError(408, f"no whole head within {self._head_timeout:g} s"))
            self._answer_refusal()
        else:
            self._transport.close()
