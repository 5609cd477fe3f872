"""The engine's end of a `grammar_check` process: starts it, asks it, sees it die."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import sys
import threading
from typing import Any

from .grammar import Grammar, GrammarError
from .grammar_vocabulary import GrammarVocabulary

WALL_SECONDS = 30.0


class GrammarChecker:
    """One process, started when it is first needed; used from one thread at a time."""

    def __init__(self, vocabulary: GrammarVocabulary) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # of starting and killing
        self._killed = False

    def check(self, grammar: Grammar) -> tuple[str, int]:
        """(What llguidance reads, bytes of memory that compiling it took). Raises GrammarError."""
        process = self._alive() or self._start(grammar)
        assert process.stdin is not None and process.stdout is not None
        question = json.dumps({"kind": grammar.kind, "text": grammar.text}).encode()
        line = b""
        try:
            process.stdin.write(question + b"\n")
            process.stdin.flush()
            poll = select.poll()
            poll.register(process.stdout, select.POLLIN)
            if poll.poll(WALL_SECONDS * 1000):
                line = process.stdout.readline()
        except BrokenPipeError:
            pass
        if not line.endswith(b"\n"):
            raise GrammarError(grammar, self._end_of_process())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise GrammarError(grammar, answer["error"])
        return answer["grammar"], answer["bytes"]

    def kill(self) -> None:
        """From any thread, for good: what `check` waits for does not come."""
        with self._lock:
            self._killed = True
            if self._process is not None:
                self._process.kill()

    def close(self) -> None:
        if self._process is not None:
            self._kill(self._process)
            self._process = None

    def _alive(self) -> subprocess.Popen[bytes] | None:
        process = self._process
        return process if process is not None and process.poll() is None else None

    def _start(self, grammar: Grammar) -> subprocess.Popen[bytes]:
        self.close()
        with self._lock:
            if self._killed:
                raise GrammarError(grammar, "is not compiled any more: the engine is closing")
            process = self._process = subprocess.Popen(
                [sys.executable, "-m", "deltaserve.engine.grammar_check"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for those who serve
            )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # killed since: the first answer does not come
            process.stdin.write(self._vocabulary.small)
        return process

    def _end_of_process(self) -> str:
        process, self._process = self._process, None
        assert process is not None
        try:
            code = process.wait(1.0)
        except subprocess.TimeoutExpired:
            code = -signal.SIGPROF
        self._kill(process)
        too_long = code == -signal.SIGPROF
        return "takes too long to compile" if too_long else "is too complex to compile"

    @staticmethod
    def _kill(process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
