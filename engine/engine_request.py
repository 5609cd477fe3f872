"""EngineRequest: the client's end of one request, and the two ways of not getting one.

Its outputs are put in by AsyncEngine and taken out by whoever answers the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .sequence import FinishReason, RequestOutput, TokenLogprobs


class EngineUnavailable(Exception):
    """The engine is loading, draining, stuck or dead; the message says which."""


class RequestRefused(Exception):
    """The engine will not run this request."""

    def __init__(self, status: int, message: str, param: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param


class EngineRequest:
    """An admitted request: iterate it for its outputs, `close` it when done in any way.

    Outputs that are not yet taken are merged into one, so that a slow reader costs no more than
    the request's own tokens. `wake` is set when there is something to take; requests that are
    read together share one.
    """

    def __init__(
        self,
        request_id: str,
        wake: asyncio.Event,
        abort: Callable[[str, FinishReason], None],
    ) -> None:
        self.request_id = request_id
        self._abort = abort
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: tuple[TokenLogprobs, ...] = ()
        self._num_cached_tokens = 0
        self._last: RequestOutput | None = None
        self._error: Exception | None = None
        self._ended = False  # nothing more comes
        self._closed = False  # the engine need not hear of it any more
        self._wake = wake

    def __aiter__(self) -> EngineRequest:
        return self

    async def __anext__(self) -> RequestOutput:
        while True:
            output = self.take()
            if output is not None:
                return output
            if self._ended:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()

    def take(self) -> RequestOutput | None:
        """What has come since the last call, as one output. Raises EngineUnavailable, after the
        last output, when the engine died or gave the request up."""
        last, self._last = self._last, None
        if not self._token_ids and last is None:
            if self._error is not None:
                raise self._error
            return None
        output = RequestOutput(
            self.request_id,
            tuple(self._token_ids),
            tuple(self._logprobs),
            last.finish_reason if last else None,
            last.stop_id if last else None,
            last.error if last else None,
            self._prompt_logprobs,
            self._num_cached_tokens,
            last.error_param if last else None,
        )
        self._prompt_logprobs, self._num_cached_tokens = (), 0
        self._token_ids.clear()
        self._logprobs.clear()
        if self._error is not None:
            self._wake.set()  # the error is still to be taken
        return output

    def close(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """Aborts the request unless it has ended; `reason` STOP: its text hit a stop string, which
        the engine hears of even where it has ended the request itself."""
        if not self._closed:
            self._closed = self._ended = True
            self._abort(self.request_id, reason)

    def push(self, output: RequestOutput) -> None:
        self._token_ids.extend(output.token_ids)
        self._logprobs.extend(output.logprobs)
        self._prompt_logprobs += output.prompt_logprobs
        self._num_cached_tokens += output.num_cached_tokens
        if output.finish_reason is not None:
            self._last = output
            self._ended = True
        self._wake.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._closed = self._ended = True
        self._wake.set()
