"""EngineRequest: what its reader is woken for."""

from __future__ import annotations

import asyncio

import pytest

from deltaserve.engine.engine_request import EngineRequest, EngineUnavailable
from deltaserve.engine.sequence import FinishReason, RequestOutput, TokenLogprobs


async def test_an_error_behind_untaken_tokens_wakes_the_reader_twice() -> None:
    """A slow reader finds tokens and the engine's death at once: first the tokens, and then it
    must not wait for what will never come."""
    wake = asyncio.Event()
    request = EngineRequest("a", wake, lambda request_id, reason: None)
    request.push(RequestOutput("a", (1, 2), (), None, None))
    request.fail(EngineUnavailable("the engine died"))
    wake.clear()
    output = request.take()
    assert output is not None and output.token_ids == (1, 2)
    assert wake.is_set()
    with pytest.raises(EngineUnavailable, match="died"):
        request.take()


async def test_an_end_behind_untaken_tokens_is_one_output() -> None:
    request = EngineRequest("a", asyncio.Event(), lambda request_id, reason: None)
    request.push(RequestOutput("a", (1,), (), None, None))
    request.push(RequestOutput("a", (2,), (), FinishReason.LENGTH, None))
    output = request.take()
    assert output is not None
    assert (output.token_ids, output.finish_reason) == ((1, 2), FinishReason.LENGTH)
    assert request.take() is None


async def test_what_is_known_of_the_prompt_survives_merging_and_is_given_once() -> None:
    request = EngineRequest("a", asyncio.Event(), lambda request_id, reason: None)
    entry = TokenLogprobs(-1.0, (3, 4), (-0.5, -1.0), 2)
    request.push(RequestOutput("a", (1,), prompt_logprobs=(entry,), num_cached_tokens=64))
    request.push(RequestOutput("a", (2,)))
    output = request.take()
    assert output is not None
    assert (output.token_ids, output.prompt_logprobs) == ((1, 2), (entry,))
    assert output.num_cached_tokens == 64
    request.push(RequestOutput("a", (3,)))
    output = request.take()
    assert output is not None
    assert (output.prompt_logprobs, output.num_cached_tokens) == ((), 0)


@pytest.mark.parametrize("finish", [None, FinishReason.LENGTH])
async def test_the_engine_hears_once_how_a_request_ended(finish: FinishReason | None) -> None:
    heard: list[FinishReason] = []
    request = EngineRequest("a", asyncio.Event(), lambda request_id, reason: heard.append(reason))
    request.push(RequestOutput("a", (1,), finish_reason=finish))
    request.close(FinishReason.STOP)
    request.close()
    assert heard == [FinishReason.STOP]


async def test_a_request_that_was_given_up_is_not_closed_again() -> None:
    heard: list[FinishReason] = []
    request = EngineRequest("a", asyncio.Event(), lambda request_id, reason: heard.append(reason))
    request.fail(EngineUnavailable("gone"))
    request.close()
    assert heard == []
