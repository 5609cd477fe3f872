"""Worker: one HTTP server over one connection to the engine, from its start to its drained end.

signal: refuse new work -> open requests end or --shutdown-timeout -> abort the rest ->
        flush connections -> return
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import time
from pathlib import Path

from deltaserve.engine.async_engine import AsyncEngine
from deltaserve.engine.generation_config import read_sampling_defaults
from deltaserve.engine.tokenizer import Tokenizer

from .app import create_app
from .chat_template import load_chat_template
from .http_server import HttpServer
from .listen import tls_context
from .options import ServerOptions
from .state import ServerState

logger = logging.getLogger("deltaserve")

FLUSH_S = 5.0  # for clients to take the last bytes of their answers


class Worker:
    """`stop` once asks it to drain, twice not to wait.

    `replaces`: it follows one that died while its engine was ready, and lets clients wait for the
    moment it takes to load rather than tell them that the model is loading. `supervisor`: a byte
    goes there when it has loaded and one comes back when all workers have.
    """

    def __init__(
        self,
        options: ServerOptions,
        engine: AsyncEngine,
        listener: socket.socket,
        replaces: bool = False,
        supervisor: socket.socket | None = None,
    ) -> None:
        self._options = options
        self._supervisor = supervisor
        self._replaces = replaces
        self._engine = engine
        self._state = ServerState(
            engine=engine,
            options=options,
            created=int(time.time()),
            others_ready=supervisor is None,
        )
        self._http = HttpServer(
            create_app(self._state), listener, tls_context(options), options.receive_timeout
        )
        self._stopping = asyncio.Event()
        self._hurried = asyncio.Event()

    def stop(self) -> None:
        (self._hurried if self._stopping.is_set() else self._stopping).set()

    def stop_on(self, *numbers: signal.Signals) -> None:
        """The second signal ends the wait for open requests."""

        def on_signal(number: signal.Signals) -> None:
            logger.info("%s: shutting down", number.name)
            self.stop()

        for number in numbers:
            asyncio.get_running_loop().add_signal_handler(number, on_signal, number)

    async def run(self) -> int:
        """Starts the engine's client, serves until `stop`; the exit code of the process."""
        await self._engine.start()
        if not self._replaces:
            await self._http.start()
        loading = asyncio.create_task(self._load())
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
            if self._replaces:
                await self._http.start()
            failed = loading.done() and not loading.result()
            if not failed:
                await stopping
                await self._drain()
            await self._http.close(FLUSH_S)
        finally:
            loading.cancel()
            stopping.cancel()
            await self._engine.close()
        return 1 if failed else 0

    async def _load(self) -> bool:
        """False, with the reason logged, when the model cannot be served."""
        path = self._options.model_path
        try:
            if self._options.generation_config == "auto":
                self._state.sampling_defaults = read_sampling_defaults(path)
            self._state.chat_template = load_chat_template(path, self._options.chat_template)
            self._state.tokenizer = await asyncio.to_thread(Tokenizer, Path(path))
        except ValueError as error:
            logger.error("%s", error)
            return False
        await self._engine.ready_or_dead.wait()
        if self._engine.facts is None:
            return False
        if self._supervisor is not None:
            loop = asyncio.get_running_loop()
            self._supervisor.setblocking(False)
            await loop.sock_sendall(self._supervisor, b"\0")
            await loop.sock_recv(self._supervisor, 1)
        self._state.others_ready = True
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
