"""EngineLoop without sockets: what it reads between two steps."""

from __future__ import annotations

import itertools
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import zmq

from deltaserve.engine import messages as msg
from deltaserve.engine.engine_loop import MAX_BYTES_A_STEP, MAX_MESSAGES_A_STEP, EngineLoop
from deltaserve.engine.grammar import Grammar
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.sequence import FinishReason

from .scripted_engine import ENDLESS, Script, ScriptedEngine


class FakeSocket:
    """Has everything at once, from one client."""

    def __init__(self, messages: list[msg.Message]) -> None:
        self.left = [msg.encode(message) for message in messages]
        self.sent: list[bytes] = []

    def recv_multipart(self, flags: int) -> tuple[bytes, bytes]:
        if not self.left:
            raise zmq.Again
        return b"client", self.left.pop(0)

    def send_multipart(self, parts: tuple[bytes, bytes]) -> None:
        self.sent.append(parts[1])

    def poll(self, timeout: int) -> bool:
        return bool(self.left)


@pytest.mark.parametrize(
    ("num_ids", "num_messages", "most"),
    [(1, 1000, MAX_MESSAGES_A_STEP), (MAX_BYTES_A_STEP // 2, 6, 2)],
    ids=["many", "long"],
)
def test_a_flood_of_requests_is_read_between_steps(
    tmp_path: Path, num_ids: int, num_messages: int, most: int
) -> None:
    prompt_ids = [ENDLESS] * num_ids
    socket: Any = FakeSocket(
        [msg.Add(str(n), prompt_ids, SamplingParams()) for n in range(num_messages)]
        + [msg.Shutdown()]
    )
    script = Script(max_queue=2000, max_model_len=1 << 21)
    seen_by_steps = [0]

    class Engine(ScriptedEngine):
        def step(self) -> Any:
            seen_by_steps.append(num_messages + 1 - len(socket.left))
            return super().step()

    EngineLoop(socket, script, tmp_path).run(Engine(script))
    read = [after - before for before, after in itertools.pairwise(seen_by_steps)]
    assert sum(read) >= num_messages - most
    assert max(read) <= most
    assert socket.left == []


class CompilingEngine(ScriptedEngine):
    def __init__(self, compiled: Future[Any]) -> None:
        super().__init__(Script())
        self._compiled = compiled

    def compile(self, grammar: Grammar) -> Future[Any]:
        return self._compiled


def test_a_client_leaves_while_its_grammar_is_compiled(tmp_path: Path) -> None:
    params = SamplingParams(grammar=Grammar("regex", "a+"))
    messages = [
        msg.Add("a", [ENDLESS], params),
        msg.Abort("a", FinishReason.ABORT),
        msg.GetStats(),
        msg.Shutdown(),
    ]
    socket: Any = FakeSocket(messages)
    compiled: Future[Any] = Future()
    assert EngineLoop(socket, Script(), tmp_path).run(CompilingEngine(compiled)) == 0
    stats = msg.decode_from_engine(socket.sent[-1])
    assert isinstance(stats, msg.EngineStats)
    assert stats.num_finished["abort"] == 1
    assert compiled.cancelled()


def test_a_compiler_that_fails_refuses_its_request_alone(tmp_path: Path) -> None:
    grammar = SamplingParams(grammar=Grammar("regex", "a+"))
    socket: Any = FakeSocket([msg.Add("a", [ENDLESS], grammar)])
    compiled: Future[Any] = Future()
    compiled.set_exception(OSError("no process can be started"))

    def poll(timeout: int) -> bool:
        """The rest comes once "a" has been answered."""
        if not socket.left:
            socket.left = [msg.encode(msg.Shutdown())]
        return True

    socket.poll = poll
    assert EngineLoop(socket, Script(), tmp_path).run(CompilingEngine(compiled)) == 0
    answers = map(msg.decode_from_engine, socket.sent)
    refusal = msg.Refused("a", 500, "the grammar could not be compiled", None)
    assert refusal in list(answers)
