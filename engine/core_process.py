"""The engine's own process: its main, and its parent's handle.

Owns the socket's address, signals and the process's life; what the process does all day is
engine_loop's. It is spawned, never forked: it starts with a fresh interpreter, no threads and no
inherited locks.

Signals: SIGINT and SIGTERM are ignored here. Ctrl-C and service managers signal the whole group,
and only the parent knows when its clients are served; it ends this process with `Shutdown` or
SIGKILL. Should the parent die in any way, this process ends at once by itself.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import zmq

from .config import ConfigError
from .engine_loop import Engine, EngineLoop
from .progress import Progress

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

BuildEngine = Callable[[Any, Progress], Engine]  # the first is the config
SetUpLogging = Callable[[], None]  # called first in the process; a function of a module, or partial


def build_llm_engine(config: Any, progress: Progress) -> Engine:
    """The real engine, imported in the engine's process alone."""
    from .llm_engine import LLMEngine

    return LLMEngine(config, progress=progress, grammars_ahead=True)


def plain_logging() -> None:
    logging.basicConfig(level=logging.INFO, format="%(levelname)s engine: %(message)s")


def run_engine_process(
    directory: str, config: Any, build: BuildEngine, crash_dir: Path, set_up_logging: SetUpLogging
) -> None:
    """Main of the spawned process; exits with 0 after Shutdown, 1 after a failure."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=_exit_with_parent, args=(directory,), daemon=True).start()
    set_up_logging()

    context = zmq.Context()
    socket = context.socket(zmq.ROUTER)
    socket.set(zmq.ROUTER_MANDATORY, 1)
    socket.set_hwm(0)  # never drops; bounded by the tokens of open requests
    socket.set(zmq.LINGER, 1000)
    socket.bind(socket_address(directory))
    loop = EngineLoop(socket, config, crash_dir)
    loop.wait_for_client()
    code = 1
    try:
        engine = build(config, loop.report_progress)
    except ConfigError as error:
        loop.fail(str(error), is_config_error=True)
    except Exception as error:
        if not isinstance(error, (ValueError, OSError)):  # those are the user's; the parent logs
            logger.exception("loading failed")
        loop.fail(f"cannot load: {error}")
    else:
        try:
            code = loop.run(engine)
        finally:
            if code == 0:
                engine.close()
    socket.close()
    context.term()
    # After a failure the engine's threads may be stuck in it: leave without joining them.
    logging.shutdown()
    os._exit(code)


def socket_address(directory: str) -> str:
    return f"ipc://{directory}/engine"


def _exit_with_parent(directory: str) -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    shutil.rmtree(directory, ignore_errors=True)
    os._exit(1)


class EngineProcess:
    """The parent's handle: starts the process, sees its death, ends it, removes its files."""

    owned = True

    def __init__(
        self,
        config: Any,
        build: BuildEngine = build_llm_engine,
        crash_dir: Path | None = None,
        set_up_logging: SetUpLogging = plain_logging,
    ) -> None:
        self._args = (config, build, crash_dir or Path(tempfile.gettempdir()), set_up_logging)

    def start(self) -> None:
        self._directory = _private_directory()
        self.address = socket_address(self._directory)
        self._process = multiprocessing.get_context("spawn").Process(
            target=run_engine_process, args=(self._directory, *self._args), name="deltaserve-engine"
        )
        start_with_signals_blocked(self._process)
        atexit.register(self._process.kill)  # else multiprocessing's own exit would wait for it

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the process ends."""
        return self._process.sentinel

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def stop(self, timeout: float) -> None:
        """Waits for an end that was asked for, then kills; blocks. Idempotent."""
        self._process.join(timeout)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        atexit.unregister(self._process.kill)
        shutil.rmtree(self._directory, ignore_errors=True)


class AttachedEngine:
    """Another worker's handle on a process that its supervisor owns: address and death alone."""

    owned = False
    exit_code = None

    def __init__(self, address: str, pid: int) -> None:
        self.address = address
        self.pid = pid

    def start(self) -> None:
        """ProcessLookupError when the process has ended."""
        self.sentinel = os.pidfd_open(self.pid)

    def stop(self, timeout: float) -> None:
        os.close(self.sentinel)


def start_with_signals_blocked(process: BaseProcess) -> None:
    """The child inherits blocked signals, so that none reaches it before it is ready for them."""
    resource_tracker.ensure_running()  # it would unblock them in start()
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def _private_directory() -> str:
    """0700, and short enough for the 107 bytes of a Unix-domain address."""
    path = tempfile.mkdtemp(prefix="deltaserve-")
    if len(os.fsencode(path)) > 90:
        os.rmdir(path)
        path = tempfile.mkdtemp(prefix="deltaserve-", dir="/tmp")
    return path
