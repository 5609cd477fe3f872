"""The typed messages between the engine's process and its clients, as MessagePack.

A client is an HTTP worker with one DEALER socket; the engine holds the ROUTER. Tokens travel as
ids: text never crosses this border. `SamplingParams`, `RequestOutput` and `Capacity` are sent as
they are, so there is one type for each on both sides.
"""

from __future__ import annotations

import msgspec

from .capacity import Capacity
from .sampling_params import SamplingParams
from .sequence import FinishReason, RequestOutput


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages: the class name is the tag."""


# ---- client to engine ----------------------------------------------------------------------------


class Hello(Message):
    """First message of a client; answered with Loading, Ready or Failed and with every change."""


class Add(Message):
    """Answered by Admitted or Refused before any output of it."""

    request_id: str
    prompt_ids: list[int]
    params: SamplingParams
    arrival_time: float = 0.0  # time.monotonic(), which all processes of a host share


class Abort(Message):
    """Frees the request; nothing of it is sent after this is read.

    `reason` says how the client ended it (STOP: a stop string was found) and is only counted.
    """

    request_id: str
    reason: FinishReason


class GetStats(Message):
    """Answered by EngineStats."""


class Profile(Message):
    """Begins or ends what a profiler with --capture-range=cudaProfilerApi records."""

    on: bool


class Shutdown(Message):
    """Ends the process at once; clients have drained or given up before they send it."""


# ---- engine to client ----------------------------------------------------------------------------


class Loading(Message):
    """`done` of `total` units of the stage; total 0 when the stage has no measure."""

    stage: str
    done: int
    total: int


class Ready(Message):
    """The model answers from here on."""

    capacity: Capacity
    vocab_limit: int  # prompt ids are below it
    device_name: str  # "cpu" or "cuda"


class Failed(Message):
    """The engine could not load or ended by an exception; the process exits after this.

    `is_config_error`: what a ConfigError says.
    """

    message: str
    is_config_error: bool = False


class Admitted(Message):
    request_id: str


class Refused(Message):
    """`status` is the HTTP status that fits: 400 can never run, 429 queue full."""

    request_id: str
    status: int
    message: str
    param: str | None


class StepOutputs(Message):
    """What one step gave the requests of one client."""

    outputs: list[RequestOutput]


class Heartbeat(Message):
    """Sent every second by the loop itself, so it stops when a step does not return.

    `last_step_time` is `time.monotonic()`, which all processes of a host share.
    """

    num_steps: int
    last_step_time: float
    has_work: bool


class HistogramCounts(msgspec.Struct, array_like=True):
    """A `latencies.Histogram`: `counts` has one more than `bounds`, for what is over them."""

    bounds: tuple[float, ...]
    counts: list[int]
    sum: float


class EngineStats(Message):
    """Counters since start and gauges of now; the one source of /metrics."""

    num_finished: dict[str, int] = {}  # by FinishReason value
    num_refused: dict[str, int] = {}  # by the HTTP status that fits
    histograms: dict[str, HistogramCounts] = {}  # by the names of `latencies.BOUNDS`
    host_seconds: float = 0.0
    device_busy_seconds: float = 0.0
    device_idle_seconds: float = 0.0
    decode_graph_rows: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_state_slots: int = 0
    num_free_state_slots: int = 0
    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_snapshots: int = 0
    num_free_snapshots: int = 0
    num_cached_blocks: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0
    num_block_evictions: int = 0
    num_snapshot_evictions: int = 0


ClientMessage = Hello | Add | Abort | GetStats | Profile | Shutdown
EngineMessage = (
    Loading | Ready | Failed | Admitted | Refused | StepOutputs | Heartbeat | EngineStats
)

_encoder = msgspec.msgpack.Encoder()
_client_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_engine_decoder: msgspec.msgpack.Decoder[EngineMessage] = msgspec.msgpack.Decoder(EngineMessage)


def encode(message: Message) -> bytes:
    return _encoder.encode(message)


def decode_from_client(data: bytes) -> ClientMessage:
    return _client_decoder.decode(data)


def decode_from_engine(data: bytes) -> EngineMessage:
    return _engine_decoder.decode(data)
