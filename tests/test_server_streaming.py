"""Racing work against a client's leaving, and what a bug of ours looks like, without sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from deltaserve.server.access_log import RequestLog
from deltaserve.server.streaming import EventStream, until_disconnect


async def never() -> dict[str, Any]:
    await asyncio.Event().wait()
    raise AssertionError


async def gone() -> dict[str, Any]:
    return {"type": "http.disconnect"}


async def test_work_that_ends_first_gives_its_result() -> None:
    async def work() -> int:
        return 5

    assert await until_disconnect(never, work()) == 5


async def test_an_error_of_the_work_is_raised() -> None:
    async def work() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await until_disconnect(never, work())


async def test_work_is_cancelled_and_finished_when_the_client_leaves() -> None:
    cleaned = []

    async def work() -> None:
        try:
            await never()
        finally:
            await asyncio.sleep(0)
            cleaned.append(True)

    with pytest.raises(ClientDisconnect):
        await until_disconnect(gone, work())
    assert cleaned == [True]


async def test_cancelling_the_race_cancels_the_work() -> None:
    cleaned = []

    async def work() -> None:
        try:
            await never()
        finally:
            cleaned.append(True)

    race = asyncio.create_task(until_disconnect(never, work()))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    race.cancel()
    with pytest.raises(asyncio.CancelledError):
        await race
    assert cleaned == [True]


async def test_a_stream_that_never_began_is_closed_too() -> None:
    closed = []

    async def events() -> AsyncGenerator[bytes, None]:
        yield b"x"

    async def stuck(message: Any) -> None:
        await never()

    stream = EventStream(events(), lambda: closed.append(True))
    with pytest.raises(ClientDisconnect):
        await stream({"type": "http"}, gone, stuck)
    assert closed == [True]


async def test_a_bug_is_a_500_with_the_request_id_and_no_details() -> None:
    async def broken(scope: Any, receive: Any, send: Any) -> None:
        raise KeyError("details of ours")

    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "GET",
        "path": "/x",
        "raw_path": b"/x",
        "headers": [(b"x-request-id", b"id-7")],
    }
    await RequestLog(broken)(scope, never, send)
    assert sent[0]["status"] == 500
    assert (b"x-request-id", b"id-7") in sent[0]["headers"]
    assert b"id-7" in sent[1]["body"] and b"details" not in sent[1]["body"]
