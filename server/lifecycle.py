"""One server's life: the engine's process, and one worker in this process or several of their own.

listen -> spawn the engine, serve (/ready 503) -> loaded -> ... -> signal -> workers drain ->
end the engine -> exit 0

It ends with 1 when the model cannot be loaded, and like a wrong flag where that is for a setting.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import time

import uvloop

from deltaserve.engine.async_engine import AsyncEngine
from deltaserve.engine.core_process import EngineProcess

from .flags import USAGE_EXIT_CODE, of_flag
from .listen import address_of
from .load_progress import LoadProgress
from .options import ServerOptions
from .supervisor import Supervisor
from .worker import Worker

logger = logging.getLogger("deltaserve")

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_server(
    options: ServerOptions, process: EngineProcess, listeners: list[socket.socket]
) -> int:
    """Blocks until the server has ended; returns the exit code. `listeners`: one a worker."""
    _raise_file_limit()
    try:
        return uvloop.run(_run(options, process, listeners))
    finally:
        for number in _SIGNALS:  # one more has nothing to end, and may not change the exit code
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        if options.uds is not None:
            os.unlink(options.uds)


async def _run(
    options: ServerOptions, process: EngineProcess, listeners: list[socket.socket]
) -> int:
    progress = LoadProgress()
    engine = AsyncEngine(process, options.step_timeout, options.request_timeout, progress)
    serving: Worker | Supervisor
    if len(listeners) == 1:
        serving = Worker(options, engine, listeners[0])
    else:
        serving = Supervisor(options, process, engine, listeners)
    serving.stop_on(*_SIGNALS)
    address = address_of(options, listeners[0])
    logger.info("listening on %s, loading %s", address, options.model_path)
    announcing = asyncio.create_task(_announce(engine, progress))
    try:
        code = await serving.run()
    finally:
        signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)  # the loop's end takes its handlers away
        announcing.cancel()
        progress.end()
    return USAGE_EXIT_CODE if code and engine.config_error is not None else code


async def _announce(engine: AsyncEngine, progress: LoadProgress) -> None:
    began = time.monotonic()
    await engine.ready_or_dead.wait()
    progress.end()
    if engine.facts is not None:
        logger.info("ready after %.1f s", time.monotonic() - began)
    elif engine.config_error is not None:
        logger.error("%s", of_flag(engine.config_error))


def _raise_file_limit() -> None:
    """Every connection is an open file, and the usual limit is meant for programs with few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    logger.debug("open files: %d, was %d", hard, soft)
