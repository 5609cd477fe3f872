"""EngineLoop with requests whose grammars are still being compiled; nobody waits for them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import zmq

from deltaserve.engine import messages as msg
from deltaserve.engine.engine_loop import EngineLoop
from deltaserve.engine.grammar import Grammar, GrammarError
from deltaserve.engine.grammar_state import CompiledFuture
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.sequence import FinishReason

from .scripted_engine import Script, ScriptedEngine


class Socket:
    """What a test has put in, and what came back."""

    def __init__(self) -> None:
        self.left: list[bytes] = []
        self.sent: list[Any] = []

    def put(self, *messages: msg.Message) -> None:
        self.left += [msg.encode(message) for message in messages]

    def recv_multipart(self, flags: int) -> tuple[bytes, bytes]:
        if not self.left:
            raise zmq.Again
        return b"client", self.left.pop(0)

    def send_multipart(self, parts: tuple[bytes, bytes]) -> None:
        self.sent.append(msg.decode_from_engine(parts[1]))

    def poll(self, timeout: int) -> bool:
        return bool(self.left)


class Engine(ScriptedEngine):
    """Compiles when the test says so; `script_of_steps[n]` runs in the n-th step."""

    def __init__(self, script: Script, *script_of_steps: Callable[[], object]) -> None:
        super().__init__(script)
        self.futures: dict[str, CompiledFuture] = {}
        self.script_of_steps = list(script_of_steps)

    def compile(self, grammar: Grammar) -> CompiledFuture:
        return self.futures.setdefault(grammar.text, Future())

    def add_request(
        self, request_id: str, prompt_ids: Any, params: Any, compiled: Any = None
    ) -> None:
        if compiled is not None:
            assert compiled.result(0) is not None
        super().add_request(request_id, prompt_ids, params)

    def step(self) -> Any:
        if self.script_of_steps:
            self.script_of_steps.pop(0)()
        return super().step()


def add(name: str, grammar: str | None = None, max_tokens: int = 8) -> msg.Add:
    params = SamplingParams(
        max_tokens=max_tokens,
        grammar=None if grammar is None else Grammar("regex", grammar, field="guided_regex"),
    )
    return msg.Add(name, [40], params)


def run(tmp_path: Path, engine: Engine, socket: Socket) -> list[Any]:
    """All answers to requests, and each one's first tokens, in order."""
    EngineLoop(socket, engine.script, tmp_path).run(engine)  # type: ignore[arg-type]
    seen: list[Any] = []
    for message in socket.sent:
        if isinstance(message, msg.Admitted):
            seen.append(("admitted", message.request_id))
        elif isinstance(message, msg.Refused):
            seen.append((message.status, message.request_id, message.param))
        elif isinstance(message, msg.StepOutputs):
            names = [output.request_id for output in message.outputs]
            seen += [(name, "runs") for name in names if (name, "runs") not in seen]
    return seen


def test_a_request_is_admitted_when_its_grammar_is_compiled(tmp_path: Path) -> None:
    socket = Socket()
    socket.put(add("slow", "s"), add("fast"), add("bad", "b"))
    compiled: Any = "compiled"
    error = GrammarError(Grammar("regex", "b", field="guided_regex"), "is none")
    engine = Engine(
        Script(),
        lambda: None,
        lambda: None,
        lambda: engine.futures["s"].set_result(compiled),
        lambda: engine.futures["b"].set_exception(error),
        lambda: None,
        lambda: None,
        lambda: socket.put(msg.Shutdown()),
    )
    assert run(tmp_path, engine, socket) == [
        ("admitted", "fast"),
        ("fast", "runs"),
        ("admitted", "slow"),
        (400, "bad", "guided_regex"),
        ("slow", "runs"),
    ]


def test_one_that_is_aborted_is_not_admitted_and_not_compiled(tmp_path: Path) -> None:
    """Unless somebody else waits for the same grammar."""
    socket = Socket()
    socket.put(add("a", "x"), add("b", "x"), add("c", "y"), add("runs"))
    compiled: Any = "compiled"
    engine = Engine(
        Script(),
        lambda: socket.put(msg.Abort("a", FinishReason.ABORT), msg.Abort("c", FinishReason.ABORT)),
        lambda: None,
        lambda: engine.futures["x"].set_result(compiled),
        lambda: None,
        lambda: socket.put(msg.GetStats(), msg.Shutdown()),
    )
    seen = run(tmp_path, engine, socket)
    assert [what for what in seen if what[0] == "admitted"] == [
        ("admitted", "runs"),
        ("admitted", "b"),
    ]
    assert engine.futures["y"].cancelled()
    (stats,) = [message for message in socket.sent if isinstance(message, msg.EngineStats)]
    assert stats.num_finished["abort"] == 2


def test_as_many_wait_as_may_be_queued(tmp_path: Path) -> None:
    socket = Socket()
    socket.put(*(add(str(n), str(n)) for n in range(5)), msg.Shutdown())
    seen = run(tmp_path, Engine(Script(max_queue=4)), socket)
    assert seen == [(429, "4", None)]


@pytest.mark.parametrize("field", ["guided_regex", "response_format"])
def test_grammars_cross_the_border_between_processes(field: str) -> None:
    params = SamplingParams(grammar=Grammar("regex", "[a-z]\u00e9", (5, 6), field))
    sent = msg.decode_from_client(msg.encode(msg.Add("a", [1], params)))
    assert isinstance(sent, msg.Add)
    assert sent.params == params
    assert sent.params.grammar is not None and sent.params.grammar.field == field
