"""One server's life: port, engine process, signals, draining, exit code.

bind the port -> spawn the engine, serve (/ready 503) -> loaded -> ... -> signal
signal: refuse new work -> open requests end or --shutdown-timeout -> abort the rest ->
        flush connections -> end the engine -> exit 0
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import uvloop

from deltaserve.engine.async_engine import AsyncEngine
from deltaserve.engine.core_process import EngineProcess
from deltaserve.engine.generation_config import read_sampling_defaults
from deltaserve.engine.tokenizer import Tokenizer

from .app import create_app
from .http_server import HttpServer
from .state import ServerState

logger = logging.getLogger("deltaserve")

FLUSH_S = 5  # for clients to take the last bytes of their answers


@dataclass(frozen=True)
class ServerOptions:
    """What the HTTP side needs; the engine's options are EngineConfig's. `generation_config`:
    whether sampling defaults come from the checkpoint's file of that name."""

    model_path: str
    served_names: tuple[str, ...]
    host: str
    port: int
    max_body_bytes: int
    shutdown_timeout: float
    step_timeout: float | None = None  # see AsyncEngine
    generation_config: Literal["auto", "none"] = "auto"


def bind(host: str, port: int) -> socket.socket:
    """Raises OSError. Bound before anything is loaded, so a port in use is known at once."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError:
        listener.close()
        raise
    return listener


def run_server(options: ServerOptions, process: EngineProcess, listener: socket.socket) -> int:
    """Blocks until the server has ended; returns the exit code."""
    return uvloop.run(_Server(options, process, listener).run())


class _Server:
    def __init__(
        self, options: ServerOptions, process: EngineProcess, listener: socket.socket
    ) -> None:
        self._options = options
        self._listener = listener
        self._engine = AsyncEngine(process, options.step_timeout)
        self._state = ServerState(
            engine=self._engine,
            served_names=options.served_names,
            created=int(time.time()),
            max_body_bytes=options.max_body_bytes,
        )
        self._http = HttpServer(create_app(self._state), listener)
        self._signalled = asyncio.Event()
        self._hurried = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal, number)
        await self._engine.start()
        await self._http.start()
        loading = asyncio.create_task(self._load())
        signalled = asyncio.create_task(self._signalled.wait())
        try:
            await asyncio.wait((loading, signalled), return_when=asyncio.FIRST_COMPLETED)
            failed = loading.done() and not loading.result()
            if not failed:
                await signalled
                await self._drain()
            await self._http.close(FLUSH_S)
        finally:
            loading.cancel()
            await self._engine.close()
        return 1 if failed else 0

    def _on_signal(self, number: int) -> None:
        """The second one ends the wait for open requests."""
        (self._hurried if self._signalled.is_set() else self._signalled).set()
        logger.info("%s: shutting down", signal.Signals(number).name)

    async def _load(self) -> bool:
        """False, with the reason logged, when the model cannot be served."""
        began = time.monotonic()
        host, port = self._listener.getsockname()[:2]
        logger.info("listening on http://%s:%d, loading %s", host, port, self._options.model_path)
        try:
            if self._options.generation_config == "auto":
                self._state.sampling_defaults = read_sampling_defaults(self._options.model_path)
            self._state.tokenizer = await asyncio.to_thread(
                Tokenizer, Path(self._options.model_path)
            )
        except ValueError as error:
            logger.error("%s", error)
            return False
        await self._engine.ready_or_dead.wait()
        if self._engine.facts is None:
            return False
        logger.info("ready after %.1f s", time.monotonic() - began)
        return True

    async def _drain(self) -> None:
        self._engine.draining = True
        if self._engine.num_open:
            logger.info("finishing %d open requests", self._engine.num_open)
        deadline = time.monotonic() + self._options.shutdown_timeout
        while self._engine.num_open and time.monotonic() < deadline:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurried.wait(), 0.05)
                break
        if self._engine.num_open:
            logger.warning("aborting %d open requests", self._engine.num_open)
            self._engine.fail_open_requests("the server is shutting down")
