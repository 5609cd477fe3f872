"""EngineLoop: feeds an engine from a socket and answers its clients; the inside of the process.

Owns who asked for what, admission answers, heartbeats, counts of finished requests and the moment
of a crash dump. Does not own the socket's or the process's life (core_process) nor scheduling
(llm_engine).
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import Any, Protocol

import zmq

from . import messages as msg
from .capacity import Capacity
from .compiling_requests import POLL_S, CompilingRequests
from .crash_dump import write_crash_dump
from .grammar import Grammar, GrammarError
from .grammar_state import CompiledFuture
from .latencies import Latencies, Submitted
from .request_queue import QueueFullError, RequestTooLargeError
from .sampling_params import SamplingParams
from .scheduled_batch import ScheduledBatch
from .sequence import FinishReason, RequestOutput, Sequence

logger = logging.getLogger(__name__)

HEARTBEAT_S = 1.0
# So that a flood of requests, or of long ones, cannot keep running ones from their steps.
MAX_MESSAGES_A_STEP = 256
MAX_BYTES_A_STEP = 1 << 20


class Engine(Protocol):
    """What the loop needs of an engine; `LLMEngine` is the real one."""

    @property
    def capacity(self) -> Capacity: ...

    @property
    def vocab_limit(self) -> int: ...

    @property
    def device_name(self) -> str: ...

    @property
    def has_work(self) -> bool: ...

    @property
    def open_sequences(self) -> list[Sequence]: ...

    @property
    def recent_batches(self) -> list[ScheduledBatch]: ...

    def add_request(
        self,
        request_id: str,
        prompt_ids: SequenceOf[int],
        params: SamplingParams,
        compiled: CompiledFuture | None = None,
    ) -> None:
        """`compiled`: of `params.grammar`. Raises ValueError for what can never run and
        QueueFullError."""

    def compile(self, grammar: Grammar) -> CompiledFuture:
        """Raises QueueFullError."""

    def abort(self, request_id: str) -> None: ...

    def step(self) -> list[RequestOutput]: ...

    @property
    def submitted(self) -> Submitted:
        """By the last call of `step`."""

    def stats(self) -> Any: ...

    def set_profiling(self, on: bool) -> None: ...

    def close(self) -> None: ...


class EngineLoop:
    """Reads clients, steps the engine, answers; one thread, nothing shared."""

    def __init__(self, socket: zmq.Socket[bytes], config: Any, crash_dir: Path) -> None:
        """`config`: the dataclass that the engine was made of, for a crash dump."""
        self._socket = socket
        self._config = config
        self._crash_dir = crash_dir
        self._engine: Engine | None = None
        self._status: msg.Loading | msg.Ready | msg.Failed = msg.Loading("starting", 0, 0)
        self._clients: set[bytes] = set()
        self._compiling = CompilingRequests()
        self._owners: dict[str, bytes] = {}  # open request -> its client
        self._with_stops: set[str] = set()  # open requests with stop strings
        self._unsettled: dict[str, bytes] = {}  # ended, and their client may still find a stop
        self._num_finished = dict.fromkeys((reason.value for reason in FinishReason), 0)
        self._num_refused: Counter[str] = Counter()
        self._latencies = Latencies()
        self._num_steps = 0
        self._last_step_time = self._last_heartbeat = time.monotonic()
        self._stopping = False

    def report_progress(self, stage: str, done: int, total: int) -> None:
        """Called while loading; sends on a new stage, else at most ten times a second."""
        now = time.monotonic()
        assert isinstance(self._status, msg.Loading)
        if stage == self._status.stage and done < total and now - self._last_heartbeat < 0.1:
            return
        self._last_heartbeat = now
        self._status = msg.Loading(stage, done, total)
        self._read_messages()
        self._broadcast(self._status)

    def wait_for_client(self) -> None:
        """The parent connects within milliseconds; it is to hear of loading from the start."""
        self._socket.poll(2000)
        self._read_messages()

    def fail(self, message: str, is_config_error: bool = False) -> None:
        self._status = msg.Failed(message, is_config_error)
        self._read_messages()
        self._broadcast(self._status)

    def run(self, engine: Engine) -> int:
        """Serves until Shutdown; returns the exit code of the process."""
        self._engine = engine
        self._status = msg.Ready(engine.capacity, engine.vocab_limit, engine.device_name)
        self._broadcast(self._status)
        while not self._stopping:
            self._heartbeat(engine)
            timeout = POLL_S if self._compiling else HEARTBEAT_S
            if engine.has_work or self._socket.poll(int(timeout * 1000)):
                self._read_messages()
            for waiting in self._compiling.take_compiled():
                client, request, compiled = waiting
                self._answer(client, self._admit(client, request, compiled))
            if not engine.has_work:
                self._last_step_time = time.monotonic()  # idle is not stuck
                continue
            began = time.monotonic()
            try:
                outputs = engine.step()
            except Exception as error:
                logger.exception("the engine failed in step %d", self._num_steps)
                self._dump(engine, error)
                return 1
            self._num_steps += 1
            self._last_step_time = time.monotonic()
            self._latencies.step(outputs, engine.submitted, began, self._last_step_time)
            self._send_outputs(outputs)
        return 0

    def _heartbeat(self, engine: Engine) -> None:
        now = time.monotonic()
        if now - self._last_heartbeat >= HEARTBEAT_S:
            self._last_heartbeat = now
            self._broadcast(msg.Heartbeat(self._num_steps, self._last_step_time, engine.has_work))

    def _dump(self, engine: Engine, error: Exception) -> None:
        """The file's path is logged here; clients of the server have no business with it."""
        try:
            path = write_crash_dump(
                self._crash_dir,
                error,
                self._config,
                engine.capacity,
                engine.open_sequences,
                engine.recent_batches,
            )
            logger.error("the last steps are in %s", path)
        except Exception:
            logger.exception("the crash dump could not be written")
        self.fail(f"the engine failed: {type(error).__name__}: {error}")

    # ---- messages --------------------------------------------------------------------------------

    def _read_messages(self) -> None:
        num_bytes = 0
        for _ in range(MAX_MESSAGES_A_STEP):
            if num_bytes >= MAX_BYTES_A_STEP:
                return
            try:
                client, data = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            num_bytes += len(data)
            self._clients.add(client)
            self._handle(client, msg.decode_from_client(data))

    def _handle(self, client: bytes, message: msg.ClientMessage) -> None:
        match message:
            case msg.Hello():
                self._send(client, self._status)
            case msg.Add():
                self._add(client, message)
            case msg.Abort():
                self._abort(message.request_id, message.reason)
            case msg.GetStats():
                self._send(client, self._stats())
            case msg.Profile():
                if self._engine is not None:
                    self._engine.set_profiling(message.on)
            case msg.Shutdown():
                self._stopping = True

    def _add(self, client: bytes, request: msg.Add) -> None:
        """What has a grammar is admitted when that is compiled; see `run`."""
        grammar, engine = request.params.grammar, self._engine
        if grammar is None or engine is None:
            self._answer(client, self._admit(client, request))
            return
        try:
            if len(self._compiling) >= engine.capacity.max_queue:
                raise QueueFullError(f"{len(self._compiling)} requests wait for their grammars")
            self._compiling.add(client, request, engine.compile(grammar))
        except QueueFullError as error:
            self._answer(client, msg.Refused(request.request_id, 429, str(error), None))

    def _answer(self, client: bytes, answer: msg.Admitted | msg.Refused) -> None:
        if isinstance(answer, msg.Refused):
            self._num_refused[str(answer.status)] += 1
        self._send(client, answer)

    def _admit(
        self, client: bytes, request: msg.Add, compiled: CompiledFuture | None = None
    ) -> msg.Admitted | msg.Refused:
        request_id = request.request_id
        if self._engine is None:
            return msg.Refused(request_id, 503, "the model is still loading", None)
        failure = None if compiled is None else compiled.exception()
        if failure is not None and not isinstance(failure, GrammarError):
            logger.error("request %s: no grammar", request_id, exc_info=failure)
            return msg.Refused(request_id, 500, "the grammar could not be compiled", None)
        try:
            self._engine.add_request(request_id, request.prompt_ids, request.params, compiled)
        except QueueFullError as error:
            return msg.Refused(request_id, 429, str(error), None)
        except RequestTooLargeError as error:
            return msg.Refused(request_id, 400, str(error), "prompt")
        except GrammarError as error:
            return msg.Refused(request_id, 400, str(error), error.field)
        except ValueError as error:
            return msg.Refused(request_id, 400, str(error), None)
        self._owners[request_id] = client
        arrival_time = request.arrival_time or time.monotonic()
        self._latencies.admit(request_id, arrival_time, len(request.prompt_ids))
        if request.params.stop:
            self._with_stops.add(request_id)
        return msg.Admitted(request_id)

    def _abort(self, request_id: str, reason: FinishReason) -> None:
        """A request may have ended before or while its Abort was on the way."""
        if self._unsettled.pop(request_id, None) is not None:
            stopped = reason is FinishReason.STOP
            self._count_end(request_id, FinishReason.STOP if stopped else FinishReason.LENGTH)
        if self._compiling.remove(request_id):
            self._num_finished[reason.value] += 1  # not admitted, so it has no latencies
        if self._owners.pop(request_id, None) is not None:
            assert self._engine is not None
            self._engine.abort(request_id)
            self._with_stops.discard(request_id)
            self._count_end(request_id, reason)

    def _send_outputs(self, outputs: list[RequestOutput]) -> None:
        by_client: dict[bytes, list[RequestOutput]] = {}
        for output in outputs:
            client = self._owners.get(output.request_id)
            if client is None:  # aborted since
                continue
            by_client.setdefault(client, []).append(output)
            if output.finish_reason is not None:
                del self._owners[output.request_id]
                if output.finish_reason is FinishReason.LENGTH and (
                    output.request_id in self._with_stops
                ):
                    self._unsettled[output.request_id] = client
                else:
                    self._count_end(output.request_id, output.finish_reason)
                self._with_stops.discard(output.request_id)
        for client, mine in by_client.items():
            self._send(client, msg.StepOutputs(mine))

    def _count_end(self, request_id: str, reason: FinishReason) -> None:
        self._num_finished[reason.value] += 1
        self._latencies.end(request_id, reason, time.monotonic())

    def _stats(self) -> msg.EngineStats:
        own: dict[str, Any] = {
            "num_finished": self._num_finished,
            "num_refused": self._num_refused,
            "histograms": {
                name: msg.HistogramCounts(histogram.bounds, histogram.counts, histogram.sum)
                for name, histogram in self._latencies.histograms.items()
            },
        }
        if self._engine is None:
            return msg.EngineStats(**own)
        stats = self._engine.stats()
        names = [name for name in msg.EngineStats.__struct_fields__ if name not in own]
        return msg.EngineStats(**own, **{name: getattr(stats, name) for name in names})

    def _broadcast(self, message: msg.Message) -> None:
        for client in list(self._clients):
            self._send(client, message)

    def _send(self, client: bytes, message: msg.Message) -> None:
        """A client that is gone loses its requests."""
        try:
            self._socket.send_multipart((client, msg.encode(message)))
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._clients.discard(client)
            owned = [*self._owners.items(), *self._unsettled.items()]
            for request_id in [r for r, owner in owned if owner == client]:
                self._abort(request_id, FinishReason.ABORT)
