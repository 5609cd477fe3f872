"""The benchmarks' HTTP client, and what it reads from a stream of events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from tests.scripted_completions import (
    ScriptedServer,
    chunked,
    completion,
    event,
    usage,
    with_length,
)
from tools.bench_answers import Outcome, read_outcome
from tools.bench_client import Answer, Client


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    yield scripted
    scripted.close()


# ---- the client ----------------------------------------------------------------------------------


async def test_pieces_are_the_same_however_the_bytes_arrive() -> None:
    data = chunked(b"one", b"twenty-seven bytes in all..", b"3")
    steps = [1, 2, 5, len(data)]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1 << 16):
            step = steps[0]
            for start in range(0, len(data), step):
                writer.write(data[start : start + step])
                await writer.drain()
                await asyncio.sleep(0)

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    client = Client(f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}")
    while steps:
        answer = await client.post("/", b"{}")
        steps.pop(0)
        assert (answer.status, answer.error) == (200, None)
        assert [piece for _, piece in answer.pieces] == [
            b"one",
            b"twenty-seven bytes in all..",
            b"3",
        ]
    client.close()
    listener.close()


async def test_a_connection_is_kept_and_replaced_when_the_server_has_closed_it(
    server: ScriptedServer,
) -> None:
    client = Client(server.url)
    body = json.dumps({"prompt": [1], "max_tokens": 1}).encode()
    for _ in range(3):
        assert (await client.post("/", body)).error is None
    assert server.num_connections == 1
    replies = iter([b"", with_length("200 OK", b"again")])
    server.reply = lambda _: next(replies)  # type: ignore[method-assign]
    assert (await client.post("/", body)).body == b"again"
    assert server.num_connections == 2
    client.close()


async def test_an_answer_that_breaks_off_is_an_error(server: ScriptedServer) -> None:
    server.reply = lambda _: b""  # type: ignore[method-assign]
    client = Client(server.url)
    answer = await client.post("/", b"{}")
    assert answer.error is not None and "ended before" in answer.error


# ---- what an answer held -------------------------------------------------------------------------


def outcome_of(*pieces: tuple[float, bytes], status: int = 200) -> Outcome:
    return read_outcome(Answer(10.0, 20.0, status, list(pieces)))


def test_times_and_counts_of_a_stream() -> None:
    outcome = outcome_of(
        (10.1, completion("")),  # no text yet
        (10.2, completion("a")[:9]),
        (10.3, completion("a")[9:]),
        (10.4, completion("bc")),
        (10.8, completion("", "length") + usage(7, 5)),
        (19.0, b"data: [DONE]\n\n"),
    )
    assert outcome.error is None
    assert (outcome.prompt_tokens, outcome.output_tokens) == (7, 5)
    assert outcome.ttft == pytest.approx(300) and outcome.e2e == pytest.approx(800)
    assert outcome.gaps == pytest.approx([100])
    assert outcome.tpot == pytest.approx(500 / 4)


def test_the_hash_is_of_ids_where_there_are_ids_and_of_text_elsewhere() -> None:
    one = outcome_of((11, completion("x", token_ids=[1])), (12, completion("y", "length")))
    other = outcome_of((11, completion("x", token_ids=[2])), (12, completion("y", "length")))
    assert one.hash_of == "token ids" and one.output_hash != other.output_hash
    text = outcome_of((11, completion("x")), (12, completion("y", "length")))
    joined = outcome_of((11, completion("xy", "length")))
    assert text.hash_of == "text" and text.output_hash == joined.output_hash


@pytest.mark.parametrize(
    ("pieces", "status", "message"),
    [
        ([(11, completion("x") + event({"error": {"message": "died"}}))], 200, "died"),
        ([(11, completion("x"))], 200, "without a finish_reason"),
        ([(11, b'{"error": {"message": "too long"}}')], 400, "400: too long"),
        ([(11, b"data: <html>\n\n")], 200, "no completion"),
    ],
)
def test_failures_are_named(pieces: list[tuple[float, bytes]], status: int, message: str) -> None:
    error = outcome_of(*pieces, status=status).error
    assert error is not None and message in error
