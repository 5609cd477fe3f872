"""Answer: outputs of the engine as they are taken, without an engine and without sockets."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from deltaserve.engine.engine_request import EngineRequest
from deltaserve.engine.output_processor import OutputProcessor
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.sequence import FinishReason, RequestOutput
from deltaserve.engine.tokenizer import Tokenizer
from deltaserve.server.answer import ChoiceState, Shown
from deltaserve.server.completion_answer import CompletionAnswer
from deltaserve.server.errors import ApiError

from .tiny_checkpoint import write_tokenizer


@pytest.mark.parametrize(
    ("param", "status", "message"),
    [("guided_regex", 400, "wrong"), (None, 500, "the request failed: wrong")],
    ids=["the sender's", "ours"],
)
async def test_what_came_before_an_error_is_shown_though_it_is_taken_with_it(
    tmp_path: Path, param: str | None, status: int, message: str
) -> None:
    write_tokenizer(tmp_path)
    tokenizer, wake, params = Tokenizer(tmp_path), asyncio.Event(), SamplingParams(stop=("cd",))
    request = EngineRequest("a", wake, lambda request_id, reason: None)
    processor = OutputProcessor(tokenizer, params, 1)
    choices = [ChoiceState(0, True, request, processor, [1])]
    answer = CompletionAnswer("id", "model", tokenizer, Shown(), wake, choices, [None])
    request.push(RequestOutput("a", (*b"abc",)))
    failed = FinishReason.ERROR
    request.push(RequestOutput("a", (), (), failed, error="wrong", error_param=param))
    shown = []
    with pytest.raises(ApiError) as caught:
        async for _, output in answer.outputs():
            shown.append((output.text, output.finish_reason))
    assert shown == [("abc", None)]
    error = caught.value
    assert (error.status, error.message, error.param) == (status, message, param)
