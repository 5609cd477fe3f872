"""Supervisor: the engine's process and several spawned workers, which serve one address together.

A worker that dies takes its own connections along and is followed by another on the same socket;
the engine frees what it ran for it. Workers that die at once, again and again, end the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import multiprocessing
import os
import signal
import socket
import time
from collections.abc import Callable

import uvloop

from deltaserve.engine.async_engine import AsyncEngine
from deltaserve.engine.core_process import (
    AttachedEngine,
    EngineProcess,
    start_with_signals_blocked,
)

from .logs import set_up_logging
from .options import ServerOptions
from .worker import FLUSH_S, Worker

logger = logging.getLogger("deltaserve")

SHORT_LIFE_S = 5.0
MAX_SHORT_LIVES = 3
_KILL_AFTER_S = 5.0  # beyond what a worker may take to drain and to flush


class Supervisor:
    """One worker a listener."""

    def __init__(
        self,
        options: ServerOptions,
        process: EngineProcess,
        engine: AsyncEngine,
        listeners: list[socket.socket],
    ) -> None:
        self._options = options
        self._process = process
        self._engine = engine
        self._listeners = listeners
        self._workers: dict[int, _WorkerProcess] = {}
        self._num_short_lives = 0
        self._all_loaded = False
        self._changed = asyncio.Event()
        self._stopping = False
        self._failed = False

    def stop_on(self, *numbers: signal.Signals) -> None:
        def on_signal(number: signal.Signals) -> None:
            logger.info("%s: shutting down", number.name)
            self._stop()

        for number in numbers:
            asyncio.get_running_loop().add_signal_handler(number, on_signal, number)

    async def run(self) -> int:
        """Until a signal has been obeyed or nothing can be served; the exit code."""
        await self._engine.start()
        try:
            for number in range(len(self._listeners)):
                self._spawn(number)
            loading = asyncio.create_task(self._watch_loading())
            while not self._stopping:
                await self._changed.wait()
                self._changed.clear()
            loading.cancel()
            await self._end_workers()
        finally:
            for worker in self._workers.values():
                worker.kill()
            await self._engine.close()
        return 1 if self._failed else 0

    async def _watch_loading(self) -> None:
        await self._engine.ready_or_dead.wait()
        if self._engine.facts is None:
            self._fail()

    def _stop(self) -> None:
        """Passed on each time: to a worker, too, the second one says not to wait."""
        self._stopping = True
        for worker in self._workers.values():
            worker.terminate()
        self._changed.set()

    def _fail(self) -> None:
        self._failed = True
        self._stop()
        self._stop()

    def _spawn(self, number: int) -> None:
        self._workers[number] = _WorkerProcess(
            self._options,
            number,
            AttachedEngine(self._process.address, self._process.pid),
            self._listeners[number],
            self._engine.facts is not None,
            self._loaded,
            functools.partial(self._ended, number),
        )

    def _loaded(self) -> None:
        """No worker says that it is ready before each could answer."""
        loaded = [worker for worker in self._workers.values() if worker.loaded]
        self._all_loaded = self._all_loaded or len(loaded) == len(self._listeners)
        if self._all_loaded:
            for worker in loaded:
                worker.tell_that_all_have_loaded()

    def _ended(self, number: int) -> None:
        worker = self._workers.pop(number)
        code, age = worker.join(), worker.age
        self._changed.set()
        if self._stopping:
            return
        self._num_short_lives = self._num_short_lives + 1 if age < SHORT_LIFE_S else 0
        if self._num_short_lives >= MAX_SHORT_LIVES or self._engine.broken is not None:
            logger.error("worker %d ended with code %s; giving up", number, code)
            self._fail()
        else:
            logger.error("worker %d ended with code %s; starting another", number, code)
            self._spawn(number)

    async def _end_workers(self) -> None:
        deadline = time.monotonic() + self._options.shutdown_timeout + FLUSH_S + _KILL_AFTER_S
        while self._workers and time.monotonic() < deadline:
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), deadline - time.monotonic())
            except TimeoutError:
                logger.error("killing workers that do not end")


class _WorkerProcess:
    """The parent's handle; starts it on construction. The callbacks run in the event loop:
    `has_loaded` when its model can be asked, `ended` at its end."""

    def __init__(
        self,
        options: ServerOptions,
        number: int,
        engine: AttachedEngine,
        listener: socket.socket,
        replaces: bool,
        has_loaded: Callable[[], None],
        ended: Callable[[], None],
    ) -> None:
        self.loaded = False
        self._has_loaded = has_loaded
        self._channel, theirs = socket.socketpair()
        self._process = multiprocessing.get_context("spawn").Process(
            target=run_worker,
            args=(options, number, engine, listener, replaces, theirs),
            name=f"deltaserve-worker-{number}",
        )
        start_with_signals_blocked(self._process)
        theirs.close()
        self._began = time.monotonic()
        self._ended = ended
        loop = asyncio.get_running_loop()
        loop.add_reader(self._process.sentinel, self._on_exit)
        loop.add_reader(self._channel, self._on_byte)

    @property
    def age(self) -> float:
        return time.monotonic() - self._began

    def _on_byte(self) -> None:
        asyncio.get_running_loop().remove_reader(self._channel)
        self.loaded = bool(self._channel.recv(1))  # nothing: it has ended
        if self.loaded:
            self._has_loaded()

    def tell_that_all_have_loaded(self) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(b"\0")

    def _on_exit(self) -> None:
        self._forget()
        self._ended()

    def _forget(self) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._process.sentinel)
        loop.remove_reader(self._channel)
        self._channel.close()

    def terminate(self) -> None:
        self._process.terminate()

    def join(self) -> int | None:
        self._process.join()
        return self._process.exitcode

    def kill(self) -> None:
        self._forget()
        self._process.kill()
        self._process.join()


def run_worker(
    options: ServerOptions,
    number: int,
    attached: AttachedEngine,
    listener: socket.socket,
    replaces: bool,
    supervisor: socket.socket,
) -> None:
    """Main of a spawned worker. It ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent passes it on as SIGTERM
    set_up_logging(options.log_level, options.log_format, f"worker {number}")

    async def serve() -> int:
        parent = multiprocessing.parent_process()
        assert parent is not None
        asyncio.get_running_loop().add_reader(parent.sentinel, os._exit, 1)
        engine = AsyncEngine(attached, options.step_timeout, options.request_timeout)
        worker = Worker(options, engine, listener, replaces, supervisor)
        worker.stop_on(signal.SIGTERM)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
        try:
            return await worker.run()
        except ProcessLookupError:  # the engine has ended, which is the parent's to tell
            return 1

    code = uvloop.run(serve())
    logging.shutdown()
    os._exit(code)
