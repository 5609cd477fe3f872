"""AsyncEngine: the asyncio client of the engine's process.

Owns the process handle, the socket, the open requests of this worker and the verdict on whether
the engine is loading, ready, stuck or dead. Does not own text (output_processor) or HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable

import zmq
import zmq.asyncio

from . import messages as msg
from .core_process import AttachedEngine, EngineProcess
from .engine_request import EngineRequest, EngineUnavailable, RequestRefused
from .sampling_params import SamplingParams
from .sequence import FinishReason, RequestOutput

logger = logging.getLogger(__name__)

STATS_TIMEOUT_S = 5.0
STEP_TIMEOUT_S = {"cuda": 30.0, "cpu": 300.0}
"""A step that takes longer is stuck. A CPU may honestly take minutes over a large model's step."""


class AsyncEngine:
    """One client of one engine process. Used from one event loop.

    `step_timeout`: seconds with work queued and no step after which the engine counts as stuck;
    it must be well over the second between two heartbeats. None: by the engine's device.
    `request_timeout`: seconds after which an open request is failed. `on_loading` is called with
    each message on the loading's progress.

    `facts` is set once the model is ready; `unavailable` says why nothing can be answered, if so.
    `config_error` is what a ConfigError said that ended the loading; it is the owner's to log, who
    knows what the user called its fields.
    """

    def __init__(
        self,
        process: EngineProcess | AttachedEngine,
        step_timeout: float | None = None,
        request_timeout: float | None = None,
        on_loading: Callable[[msg.Loading], None] | None = None,
    ) -> None:
        self.facts: msg.Ready | None = None
        self.config_error: str | None = None
        self.loading = msg.Loading("starting the engine", 0, 0)
        self.draining = False
        self.dead = asyncio.Event()
        self.ready_or_dead = asyncio.Event()
        self._process = process
        self._step_timeout = step_timeout
        self._request_timeout = request_timeout
        self._on_loading = on_loading
        self._death: str | None = None
        self._heartbeat = msg.Heartbeat(0, time.monotonic(), False)
        self._last_heard = time.monotonic()
        self._stuck = False
        self._admissions: dict[str, asyncio.Future[None]] = {}
        self._open: dict[str, EngineRequest] = {}
        self._deadlines: dict[str, float] = {}
        self._stats: list[asyncio.Future[msg.EngineStats]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._context = zmq.asyncio.Context()

    # ---- life ------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Spawns the process, if it is this client's own, and returns; loading goes on."""
        self._process.start()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.set_hwm(0)
        self._socket.set(zmq.RECONNECT_IVL, 20)  # ms, until the engine has bound its address
        self._socket.set(zmq.LINGER, 0)
        self._socket.connect(self._process.address)
        self._send(msg.Hello())
        asyncio.get_running_loop().add_reader(self._process.sentinel, self._on_exit)
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._watch())]

    async def close(self) -> None:
        """Ends the process, if it is this client's own, and removes its files. One that loads or is
        stuck cannot listen and is killed; one that failed is on its way out."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._process.sentinel)
        self.fail_open_requests("the server is shutting down")
        listens = self.facts is not None and self._death is None and not self._stuck
        if listens and self._process.owned:
            self._send(msg.Shutdown())
        ends_itself = listens or self._death is not None
        await asyncio.to_thread(self._process.stop, 5.0 if ends_itself else 0.0)
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._socket.close()
        self._context.term()

    @property
    def unavailable(self) -> str | None:
        """Why no request can be answered now, or None."""
        if self.broken is not None:
            return self.broken
        if self.facts is None:
            return f"the model is loading: {self.loading.stage}"
        return "the server is draining" if self.draining else None

    @property
    def broken(self) -> str | None:
        """Why the engine is dead or stuck, or None."""
        if self._death is not None:
            return self._death
        return "the engine is stuck: it has work and makes no step" if self._stuck else None

    @property
    def step_timeout(self) -> float:
        """Seconds; that of a GPU until the engine is ready, which no step is made before."""
        if self._step_timeout is not None:
            return self._step_timeout
        return STEP_TIMEOUT_S["cuda" if self.facts is None else self.facts.device_name]

    @property
    def num_open(self) -> int:
        return len(self._open)

    # ---- requests --------------------------------------------------------------------------------

    async def add(
        self,
        request_id: str,
        prompt_ids: list[int],
        params: SamplingParams,
        wake: asyncio.Event | None = None,
        arrival_time: float | None = None,
    ) -> EngineRequest:
        """Returns once the engine has admitted it. Raises RequestRefused, EngineUnavailable.

        `request_id` must be new. `arrival_time`: `time.monotonic()` at the client's first byte,
        from which latencies and the time-out are counted. Cancelling aborts the request.
        """
        if self.unavailable is not None:
            raise EngineUnavailable(self.unavailable)
        assert request_id not in self._admissions and request_id not in self._open
        admission: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        request = EngineRequest(request_id, wake or asyncio.Event(), self._forget)
        arrival_time = arrival_time or time.monotonic()
        self._admissions[request_id] = admission
        self._open[request_id] = request
        if self._request_timeout is not None:
            self._deadlines[request_id] = arrival_time + self._request_timeout
        self._send(msg.Add(request_id, prompt_ids, params, arrival_time))
        try:
            await admission
        except asyncio.CancelledError:
            request.close()
            raise
        return request

    async def generate(
        self, prompt_ids: list[int], params: SamplingParams, request_id: str
    ) -> AsyncIterator[RequestOutput]:
        """`add` and iterate; leaving the iteration aborts the request."""
        request = await self.add(request_id, prompt_ids, params)
        try:
            async for output in request:
                yield output
        finally:
            request.close()

    async def stats(self) -> msg.EngineStats:
        """Raises EngineUnavailable, also when no answer comes."""
        if self.broken is not None:
            raise EngineUnavailable(self.broken)
        future: asyncio.Future[msg.EngineStats] = asyncio.get_running_loop().create_future()
        self._stats.append(future)
        self._send(msg.GetStats())
        try:
            return await asyncio.wait_for(future, STATS_TIMEOUT_S)
        except TimeoutError:
            raise EngineUnavailable("the engine does not answer") from None

    async def set_profiling(self, on: bool) -> None:
        """Returns once the engine has done so, which answers in order. Raises EngineUnavailable."""
        if self.broken is None:
            self._send(msg.Profile(on))
        await self.stats()

    def fail_open_requests(self, message: str) -> None:
        """Ends every open request with an error and aborts it in the engine."""
        for request_id in list(self._open):
            self._fail(request_id, message)
        for future in self._stats:
            if not future.done():
                future.set_exception(EngineUnavailable(message))
        self._stats.clear()

    def _fail(self, request_id: str, message: str) -> None:
        request, admission = self._open[request_id], self._admissions.get(request_id)
        self._forget(request_id, FinishReason.ABORT)
        request.fail(EngineUnavailable(message))
        if admission is not None and not admission.done():
            admission.set_exception(EngineUnavailable(message))

    def _forget(self, request_id: str, reason: FinishReason) -> None:
        self._admissions.pop(request_id, None)
        self._open.pop(request_id, None)
        self._deadlines.pop(request_id, None)
        if self._death is None:
            self._send(msg.Abort(request_id, reason))

    # ---- the socket ------------------------------------------------------------------------------

    def _send(self, message: msg.Message) -> None:
        """Never blocks: without a high-water mark a send is done when it returns."""
        self._socket.send(msg.encode(message))

    async def _receive(self) -> None:
        while True:
            self._handle(msg.decode_from_engine(await self._socket.recv()))
            self._last_heard = time.monotonic()

    def _handle(self, message: msg.EngineMessage) -> None:
        match message:
            case msg.StepOutputs():
                for output in message.outputs:
                    self._deliver(output)
            case msg.Admitted():
                admission = self._admissions.pop(message.request_id, None)
                if admission is not None and not admission.done():
                    admission.set_result(None)
            case msg.Refused():
                self._refused(message)
            case msg.Heartbeat():
                self._heartbeat = message
            case msg.EngineStats():
                if self._stats:
                    future = self._stats.pop(0)
                    if not future.done():
                        future.set_result(message)
            case msg.Loading():
                self.loading = message
                if self._on_loading is not None:
                    self._on_loading(message)
            case msg.Ready():
                self.facts = message
                self.ready_or_dead.set()
            case msg.Failed():
                if message.is_config_error:
                    self.config_error = message.message
                self._die(message.message)

    def _refused(self, answer: msg.Refused) -> None:
        admission = self._admissions.pop(answer.request_id, None)
        self._open.pop(answer.request_id, None)
        self._deadlines.pop(answer.request_id, None)
        if admission is not None and not admission.done():
            admission.set_exception(RequestRefused(answer.status, answer.message, answer.param))

    def _deliver(self, output: RequestOutput) -> None:
        request = self._open.get(output.request_id)
        if request is None:
            return
        if output.finish_reason is not None:
            del self._open[output.request_id]
            self._deadlines.pop(output.request_id, None)
        request.push(output)

    # ---- death and stuckness ---------------------------------------------------------------------

    def _on_exit(self) -> None:
        """The sentinel fired. A Failed message may still be in the socket and says more."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._process.sentinel)
        loop.call_later(0.2, self._exited)

    def _exited(self) -> None:
        code = self._process.exit_code
        self._die("the engine process ended" + (f" (exit code {code})" if code is not None else ""))

    def _die(self, reason: str) -> None:
        if self._death is None:
            if reason != self.config_error:
                logger.error("engine: %s", reason)
            self._death = reason
            self.fail_open_requests(reason)
            self.dead.set()
            self.ready_or_dead.set()

    async def _watch(self) -> None:
        await self.ready_or_dead.wait()
        timeout = self.step_timeout
        while self._death is None:
            await asyncio.sleep(min(1.0, timeout / 4, (self._request_timeout or timeout) / 4))
            self._fail_overdue()
            was_stuck, self._stuck = self._stuck, self._is_stuck(timeout)
            if self._stuck and not was_stuck:
                logger.error("engine: no step for %.0f s with work queued", timeout)
                self.fail_open_requests("the engine is stuck")
            elif was_stuck and not self._stuck:
                logger.warning("engine: makes steps again")

    def _fail_overdue(self) -> None:
        now = time.monotonic()
        for request_id in [r for r, deadline in self._deadlines.items() if deadline < now]:
            self._fail(request_id, f"the request took longer than {self._request_timeout:g} s")

    def _is_stuck(self, timeout: float) -> bool:
        """The loop itself sends heartbeats, so silence says it does not return from a step."""
        now = time.monotonic()
        silent = now - self._last_heard > timeout
        return silent or (
            self._heartbeat.has_work and now - self._heartbeat.last_step_time > timeout
        )
