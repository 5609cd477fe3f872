"""POST /v1/completions: a well-formed request -> engine requests -> text, whole or streamed.

The order of things: field types, prompts, parameters, then the engine, which has the last word on
length and queue; its refusals pass through with their numbers.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from deltaserve.engine.engine_request import EngineRequest, EngineUnavailable, RequestRefused
from deltaserve.engine.output_processor import OutputProcessor, TextOutput
from deltaserve.engine.sampling_params import SamplingParams

from .answer import Answer, ChoiceState, Shown
from .echo import PromptEcho
from .errors import ApiError, JsonResponse, internal_error
from .prompts import PromptLimits, encode, read_prompts
from .protocol import Completion, CompletionBody, StreamOptions, num_choices, parse_completion
from .request_body import read_json_body
from .sampling_fields import of_choice, sampling_params
from .state import ServerState
from .streaming import DONE, EventStream, event, until_disconnect

logger = logging.getLogger("deltaserve")

MAX_ALLOWED_IDS = 1 << 20
"""Of all choices: each takes its own list to the engine."""
BURST_TOKENS = 1 << 16
"""Prompt tokens sent to the engine before this process looks at its other clients again."""


@dataclass(frozen=True)
class _Prompt:
    ids: list[int]
    echo: PromptEcho | None


async def completions(request: Request) -> Response:
    state: ServerState = request.app.state.server
    body = await read_json_body(request, state.max_body_bytes)
    if state.unavailable is not None:
        raise ApiError(503, state.unavailable, headers={"Retry-After": "1"})
    fields = parse_completion(body)
    if fields.model not in state.served_names:
        raise ApiError(
            404, f"the model {fields.model[:100]!r} does not exist", "model", "model_not_found"
        )
    return await until_disconnect(request.receive, _answer(request, state, fields))


async def _answer(request: Request, state: ServerState, fields: CompletionBody) -> Response:
    """No response begins before the engine has admitted every choice."""
    facts, tokenizer = state.engine.facts, state.tokenizer
    assert facts is not None and tokenizer is not None
    limits = PromptLimits.of(facts.capacity.max_model_len, facts.vocab_limit, tokenizer)
    prompts = await read_prompts(fields.prompt, limits)
    n = num_choices(fields, len(prompts))
    params = await sampling_params(fields, state.sampling_defaults, tokenizer, facts.vocab_limit)
    num_ids = n * len(prompts) * len(params.allowed_token_ids or ())
    if num_ids > MAX_ALLOWED_IDS:
        message = f"allowed_token_ids: {num_ids} over all choices, at most {MAX_ALLOWED_IDS}"
        raise ApiError(400, message, "allowed_token_ids")
    encoded: list[_Prompt] = []
    for prompt in prompts:
        ids = prompt if isinstance(prompt, list) else await encode(tokenizer, prompt, limits)
        echo = await asyncio.to_thread(PromptEcho, tokenizer, ids) if fields.echo else None
        encoded.append(_Prompt(ids, echo))
    wake = asyncio.Event()
    answer = Answer(
        id=f"cmpl-{request.state.request_id}",
        model=fields.model,
        tokenizer=tokenizer,
        shown=Shown(fields.logprobs, fields.prompt_logprobs, bool(fields.return_token_ids)),
        wake=wake,
        choices=await _admit(request, state, params, encoded, n, wake),
    )
    if fields.stream:
        options = fields.stream_options or StreamOptions()
        return EventStream(_events(request, answer, options), answer.close)
    try:
        return JsonResponse(await _collect(request, answer))
    finally:
        answer.close()


async def _admit(
    request: Request,
    state: ServerState,
    params: SamplingParams,
    prompts: list[_Prompt],
    n: int,
    wake: asyncio.Event,
) -> list[ChoiceState]:
    """All choices of all prompts or none."""
    assert state.tokenizer is not None
    unique = uuid.uuid4().hex[:12]  # X-Request-Id may repeat, engine ids must not
    arrival_time: float = request.state.arrival_time
    of_choices = [of_choice(params, number) for number in range(n)]
    adding: list[asyncio.Task[EngineRequest]] = []
    try:
        burst = 0
        for index, prompt in enumerate(prompts):
            for number, own in enumerate(of_choices):
                burst += len(prompt.ids)
                if burst > BURST_TOKENS:
                    await asyncio.sleep(0)
                    burst = len(prompt.ids)
                name = f"{request.state.request_id}-{unique}-{index * n + number}"
                add = state.engine.add(name, prompt.ids, own, wake, arrival_time)
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
    return [
        ChoiceState(
            index=index,
            first_of_prompt=index % n == 0,
            request=added,
            processor=OutputProcessor(
                state.tokenizer, of_choices[index % n], len(prompts[index // n].ids)
            ),
            prompt_ids=prompts[index // n].ids,
            echo=prompts[index // n].echo,
        )
        for index, added in enumerate(requests)
    ]


def _refusal(error: RequestRefused) -> ApiError:
    if error.status == 429:
        return ApiError(429, error.message, code="queue_full", headers={"Retry-After": "1"})
    return ApiError(error.status, error.message, error.param)


async def _collect(request: Request, answer: Answer) -> Completion:
    outputs: list[list[TextOutput]] = [[] for _ in answer.choices]
    async for choice, output in answer.outputs():
        outputs[choice.index].append(output)
    choices = [
        await answer.choice(choice, parts)
        for choice, parts in zip(answer.choices, outputs, strict=True)
    ]
    _note(request, answer, answer.finish_reasons)
    return answer.chunk(choices, answer.usage())


async def _events(
    request: Request, answer: Answer, options: StreamOptions
) -> AsyncGenerator[bytes, None]:
    """A chunk whenever there is something to show; an error ends the stream."""
    finish: str | None = None
    no_usage = None if options.include_usage else UNSET
    try:
        async for choice, output in answer.outputs():
            if answer.shows(choice, output):
                usage = answer.usage() if options.continuous_usage_stats else no_usage
                yield event(answer.chunk([await answer.choice(choice, (output,))], usage))
        finish = answer.finish_reasons
        if options.include_usage:
            yield event(answer.chunk([], answer.usage()))
    except ApiError as error:
        finish = "error"
        yield event(error.body())
    except Exception:
        finish = "error"
        request_id = request.state.request_id
        logger.exception("request %s failed", request_id)
        yield event(internal_error(request_id).body())
    finally:
        _note(request, answer, finish or "abort")
    yield DONE


def _note(request: Request, answer: Answer, finish_reason: str) -> None:
    """For the access log: numbers, no text."""
    usage = answer.usage()
    request.state.summary = (
        f" prompt_tokens={usage.prompt_tokens} completion_tokens={usage.completion_tokens} "
        f"finish_reason={finish_reason}"
    )
