"""From a parsed request to running ones: is the server ready, is it this model, does it all fit.

The engine has the last word on length and queue; its refusals pass through with their numbers.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from deltaserve.engine.engine_request import EngineRequest, EngineUnavailable, RequestRefused
from deltaserve.engine.output_processor import OutputProcessor
from deltaserve.engine.sampling_params import SamplingParams

from .answer import ChoiceState
from .errors import ApiError
from .protocol import SamplingFields
from .request_body import read_json_body
from .sampling_fields import of_choice
from .state import ServerState
from .streaming import until_disconnect

Fields = TypeVar("Fields", bound=SamplingFields)

MAX_ALLOWED_IDS = 1 << 20
"""Of all choices: each takes its own list to the engine."""
BURST_TOKENS = 1 << 16
"""Prompt tokens sent to the engine before this process looks at its other clients again."""


def require_ready(state: ServerState) -> None:
    if state.unavailable is not None:
        raise ApiError(503, state.unavailable, headers={"Retry-After": "1"})


def require_model(state: ServerState, name: str) -> None:
    if name not in state.served_names:
        raise ApiError(404, f"the model {name[:100]!r} does not exist", "model", "model_not_found")


async def answer_body(
    request: Request,
    parse: Callable[[bytes], Fields],
    answer: Callable[[Request, ServerState, Fields], Coroutine[Any, Any, Response]],
) -> Response:
    """What every generating route begins with: a body for a model that is served and ready. The
    work of `answer` ends when the client goes."""
    state: ServerState = request.app.state.server
    body = await read_json_body(request, state.max_body_bytes)
    require_ready(state)
    fields = parse(body)
    require_model(state, fields.model)
    return await until_disconnect(request.receive, answer(request, state, fields))


async def admit(
    request: Request,
    state: ServerState,
    params: SamplingParams,
    prompts: Sequence[list[int]],
    n: int,
    wake: asyncio.Event,
) -> list[ChoiceState]:
    """n choices of each prompt: all of them or none. Raises ApiError."""
    assert state.tokenizer is not None
    num_ids = n * len(prompts) * len(params.allowed_token_ids or ())
    if num_ids > MAX_ALLOWED_IDS:
        message = f"allowed_token_ids: {num_ids} over all choices, at most {MAX_ALLOWED_IDS}"
        raise ApiError(400, message, "allowed_token_ids")
    unique = uuid.uuid4().hex[:12]  # X-Request-Id may repeat, engine ids must not
    arrival_time: float = request.state.arrival_time
    of_choices = [of_choice(params, number) for number in range(n)]
    adding: list[asyncio.Task[EngineRequest]] = []
    try:
        burst = 0
        for index, prompt_ids in enumerate(prompts):
            for number, own in enumerate(of_choices):
                burst += len(prompt_ids)
                if burst > BURST_TOKENS:
                    await asyncio.sleep(0)
                    burst = len(prompt_ids)
                name = f"{request.state.request_id}-{unique}-{index * n + number}"
                add = state.engine.add(name, prompt_ids, own, wake, arrival_time)
                adding.append(asyncio.create_task(add))
        requests = await asyncio.gather(*adding)
    except BaseException as error:
        for task in adding:
            task.cancel()
        for outcome in await asyncio.gather(*adding, return_exceptions=True):
            if isinstance(outcome, EngineRequest):
                outcome.close()
        if isinstance(error, RequestRefused):
            raise _refusal(error) from None
        if isinstance(error, EngineUnavailable):
            raise ApiError(503, str(error), headers={"Retry-After": "1"}) from None
        raise
    choices = [
        ChoiceState(
            index=index,
            first_of_prompt=index % n == 0,
            request=added,
            processor=OutputProcessor(
                state.tokenizer, of_choices[index % n], len(prompts[index // n])
            ),
            prompt_ids=prompts[index // n],
        )
        for index, added in enumerate(requests)
    ]
    if params.prompt_logprobs is not None and of_choices[-1].prompt_logprobs is None:
        for choice in choices:
            if not choice.first_of_prompt:
                choice.first = choices[choice.index - choice.index % n]
    return choices


def _refusal(error: RequestRefused) -> ApiError:
    if error.status == 429:
        return ApiError(429, error.message, code="queue_full", headers={"Retry-After": "1"})
    return ApiError(error.status, error.message, error.param)
