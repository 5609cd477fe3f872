"""HttpServer: an ASGI application on listening sockets, until it is told to close."""

from __future__ import annotations

import asyncio
import socket
import ssl

from starlette.types import ASGIApp

from .http_protocol import HEAD_TIMEOUT_S, HttpProtocol


class HttpServer:
    """Serves `app` on `listener` between `start` and `close`, in the running event loop."""

    def __init__(
        self,
        app: ASGIApp,
        listener: socket.socket,
        tls: ssl.SSLContext | None = None,
        head_timeout: float = HEAD_TIMEOUT_S,
    ) -> None:
        self._app = app
        self._listener = listener
        self._tls = tls
        self._head_timeout = head_timeout
        self._connections: set[HttpProtocol] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        loop = asyncio.get_running_loop()
        create = (
            loop.create_unix_server
            if self._listener.family == socket.AF_UNIX
            else loop.create_server
        )
        self._server = await create(
            lambda: HttpProtocol(self._app, self._connections, self._tasks, self._head_timeout),
            sock=self._listener,
            backlog=2048,
            ssl=self._tls,
        )

    async def close(self, timeout: float) -> None:
        """Accepts nothing more; idle connections end at once, others get `timeout` seconds for what
        is left of their answers."""
        self._server.close()
        for connection in list(self._connections):
            connection.shut_down()
        deadline = asyncio.get_running_loop().time() + timeout
        while self._connections and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.01)
        for connection in list(self._connections):
            connection.abort()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
