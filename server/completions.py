"""POST /v1/completions: a well-formed request -> engine requests -> text, whole or streamed.

Owns the checks that need the model (names, vocabulary) and the assembly of answers. The context
length and the queue are the engine's to check: its refusals pass through with their numbers.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from deltaserve.engine.engine_request import EngineRequest, EngineUnavailable, RequestRefused
from deltaserve.engine.output_processor import OutputProcessor, TextLogprob, TextOutput
from deltaserve.engine.sequence import FinishReason, RequestOutput

from .errors import ApiError, JsonResponse, internal_error
from .protocol import (
    Choice,
    Completion,
    CompletionRequest,
    Logprobs,
    Usage,
    parse_completion,
    parse_json,
)
from .request_body import read_json_body
from .state import ServerState
from .streaming import DONE, EventStream, event, until_disconnect

logger = logging.getLogger("deltaserve")

MIN_LOGPROB = -9999.0  # JSON has no infinity
NORMALISED = 4
"""Unicode normalisation makes at most so many characters one. A text that cannot fit even so is
refused unread: to tokenise megabytes takes a thread for as many seconds, which nothing can end."""


@dataclass
class _Running:
    """One choice of an answer."""

    index: int
    request: EngineRequest
    processor: OutputProcessor


@dataclass
class _Answer:
    """The admitted requests of one HTTP request and what their chunks have in common."""

    id: str
    model: str
    include_usage: bool
    wake: asyncio.Event
    choices: list[_Running]
    created: int = field(default_factory=lambda: int(time.time()))

    def close(self) -> None:
        for choice in self.choices:
            choice.request.close()

    async def outputs(self) -> AsyncIterator[tuple[int, TextOutput]]:
        """(choice index, what is new) until all choices have ended. Raises ApiError."""
        running = list(self.choices)
        while running:
            await self.wake.wait()
            self.wake.clear()
            for choice in running:
                output = _take(choice.request)
                if output is None:
                    continue
                text = choice.processor.process(output)
                if text.must_abort:
                    choice.request.close(FinishReason.STOP)
                if text.finish_reason is FinishReason.ERROR:
                    raise ApiError(500, f"the request failed: {text.error}")
                yield choice.index, text
            running = [choice for choice in running if choice.processor.finish_reason is None]

    def chunk(self, choices: list[Choice], usage: Usage | msgspec.UnsetType | None) -> Completion:
        return Completion(self.id, self.created, self.model, choices, usage)

    def usage(self) -> Usage:
        prompt = sum(choice.processor.num_prompt_tokens for choice in self.choices)
        output = sum(choice.processor.num_output_tokens for choice in self.choices)
        return Usage(prompt, output, prompt + output)


async def completions(request: Request) -> Response:
    state: ServerState = request.app.state.server
    body = await read_json_body(request, state.max_body_bytes)
    if state.unavailable is not None:
        raise ApiError(503, state.unavailable, headers={"Retry-After": "1"})
    wanted = parse_completion(parse_json(body))
    if wanted.model not in state.served_names:
        raise ApiError(
            404, f"the model {wanted.model[:100]!r} does not exist", "model", "model_not_found"
        )
    return await until_disconnect(request.receive, _answer(request, state, wanted))


async def _answer(request: Request, state: ServerState, wanted: CompletionRequest) -> Response:
    """No response begins before the engine has admitted every prompt."""
    prompts = await _token_ids(state, wanted)
    answer = await _admit(request.state.request_id, state, wanted, prompts)
    if wanted.stream:
        return EventStream(_events(request, answer), answer.close)
    try:
        return JsonResponse(await _collect(request, answer))
    finally:
        answer.close()


async def _token_ids(state: ServerState, wanted: CompletionRequest) -> list[list[int]]:
    assert state.engine.facts is not None and state.tokenizer is not None
    limit = state.engine.facts.vocab_limit
    max_tokens = state.engine.facts.capacity.max_model_len
    max_chars = NORMALISED * max_tokens * state.tokenizer.max_token_bytes
    prompts = []
    for prompt in wanted.prompts:
        if isinstance(prompt, str):
            if len(prompt) > max_chars:
                raise ApiError(
                    400,
                    f"the prompt has {len(prompt)} characters, more than the context length of "
                    f"{max_tokens} tokens can hold",
                    "prompt",
                )
            prompts.append(await asyncio.to_thread(state.tokenizer.encode, prompt))
            continue
        for token_id in (min(prompt), max(prompt)):
            if not 0 <= token_id < limit:
                raise ApiError(
                    400, f"prompt: token id {token_id} is not in 0 .. {limit - 1}", "prompt"
                )
        prompts.append(prompt)
    return prompts


async def _admit(
    request_id: str, state: ServerState, wanted: CompletionRequest, prompts: list[list[int]]
) -> _Answer:
    """All prompts or none."""
    assert state.tokenizer is not None
    wake = asyncio.Event()
    unique = uuid.uuid4().hex[:12]  # X-Request-Id may repeat, engine ids must not
    adding = [
        asyncio.ensure_future(
            state.engine.add(f"{request_id}-{unique}-{index}", ids, wanted.params, wake)
        )
        for index, ids in enumerate(prompts)
    ]
    try:
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
        _Running(index, added, OutputProcessor(state.tokenizer, wanted.params, len(ids)))
        for index, (added, ids) in enumerate(zip(requests, prompts, strict=True))
    ]
    return _Answer(f"cmpl-{request_id}", wanted.model, wanted.include_usage, wake, choices)


def _refusal(error: RequestRefused) -> ApiError:
    if error.status == 429:
        return ApiError(429, error.message, code="queue_full", headers={"Retry-After": "1"})
    return ApiError(error.status, error.message, error.param)


def _take(request: EngineRequest) -> RequestOutput | None:
    try:
        return request.take()
    except EngineUnavailable as error:
        raise ApiError(503, str(error)) from None


async def _collect(request: Request, answer: _Answer) -> Completion:
    outputs: list[list[TextOutput]] = [[] for _ in answer.choices]
    async for index, output in answer.outputs():
        outputs[index].append(output)
    choices = [
        _choice(
            index,
            "".join(part.text for part in parts),
            [item for part in parts for item in part.logprobs],
            parts[-1],
        )
        for index, parts in enumerate(outputs)
    ]
    _note(request, answer, choices[0].finish_reason)
    return answer.chunk(choices, answer.usage())


async def _events(request: Request, answer: _Answer) -> AsyncGenerator[bytes, None]:
    """A chunk whenever there is text, log-probabilities or an end; an error ends the stream."""
    usage = None if answer.include_usage else msgspec.UNSET
    finish: str | None = None
    try:
        async for index, output in answer.outputs():
            if output.text or output.logprobs or output.finish_reason:
                choice = _choice(index, output.text, output.logprobs, output)
                finish = choice.finish_reason or finish
                yield event(answer.chunk([choice], usage))
        if answer.include_usage:
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


def _choice(index: int, text: str, logprobs: Sequence[TextLogprob], last: TextOutput) -> Choice:
    return Choice(
        index=index,
        text=text,
        logprobs=_logprobs(logprobs) if logprobs else None,
        finish_reason=last.finish_reason.value if last.finish_reason else None,
        stop_reason=last.stop_reason,
    )


def _logprobs(items: Sequence[TextLogprob]) -> Logprobs:
    """The chosen token is among the alternatives of its position, whatever its rank."""
    tops: list[dict[str, float]] = []
    for item in items:
        top: dict[str, float] = {}
        for token, value in (*item.top, (item.token, item.logprob)):
            top.setdefault(token, max(value, MIN_LOGPROB))
        tops.append(top)
    return Logprobs(
        tokens=[item.token for item in items],
        token_logprobs=[max(item.logprob, MIN_LOGPROB) for item in items],
        top_logprobs=tops,
        text_offset=[item.text_offset for item in items],
    )


def _note(request: Request, answer: _Answer, finish_reason: str | None) -> None:
    """For the access log: numbers, no text."""
    usage = answer.usage()
    request.state.summary = (
        f" prompt_tokens={usage.prompt_tokens} completion_tokens={usage.completion_tokens} "
        f"finish_reason={finish_reason}"
    )
