"""Requests that wait for their grammar to be compiled, before they are queued."""

from __future__ import annotations

from typing import NamedTuple

from .grammar_state import CompiledFuture
from .messages import Add

POLL_S = 0.005
"""How often an idle engine looks: most grammars take about that long."""


class Compiling(NamedTuple):
    client: bytes
    request: Add
    compiled: CompiledFuture


class CompilingRequests:
    """By request_id, in order of arrival."""

    def __init__(self) -> None:
        self._waiting: dict[str, Compiling] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, client: bytes, request: Add, compiled: CompiledFuture) -> None:
        self._waiting[request.request_id] = Compiling(client, request, compiled)

    def remove(self, request_id: str) -> bool:
        """Whether it was here. A grammar that nobody else waits for need not be compiled."""
        removed = self._waiting.pop(request_id, None)
        if removed is None:
            return False
        if all(other.compiled is not removed.compiled for other in self._waiting.values()):
            removed.compiled.cancel()
        return True

    def take_compiled(self) -> list[Compiling]:
        """Those that need not wait any longer, whatever became of their grammar."""
        taken = [waiting for waiting in self._waiting.values() if waiting.compiled.done()]
        for waiting in taken:
            del self._waiting[waiting.request.request_id]
        return taken
