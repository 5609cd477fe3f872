"""An Answer as a response: whole, or as a stream of events that says when something went wrong."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator

import msgspec
from msgspec import UNSET, UnsetType
from starlette.requests import Request
from starlette.responses import Response

from deltaserve.engine.output_processor import TextOutput

from .answer import Answer
from .errors import ApiError, JsonResponse, internal_error
from .protocol import StreamOptions, Usage
from .streaming import DONE, EventStream, event

logger = logging.getLogger("deltaserve")


async def reply(
    request: Request, answer: Answer, stream: bool | None, options: StreamOptions | None
) -> Response:
    """Closes `answer` when all is said or the client has gone."""
    if stream:
        return EventStream(_events(request, answer, options or StreamOptions()), answer.close)
    try:
        return JsonResponse(await _collect(request, answer))
    finally:
        answer.close()


async def _collect(request: Request, answer: Answer) -> msgspec.Struct:
    outputs: list[list[TextOutput]] = [[] for _ in answer.choices]
    async for choice, output in answer.outputs():
        outputs[choice.index].append(output)
    choices = [
        await answer.choice(choice, parts)
        for choice, parts in zip(answer.choices, outputs, strict=True)
    ]
    _note(request, answer, answer.finish_reasons)
    return answer.whole(choices, answer.usage())


async def _events(
    request: Request, answer: Answer, options: StreamOptions
) -> AsyncGenerator[bytes, None]:
    """A chunk whenever there is something to show; an error ends the stream."""
    finish: str | None = None

    def usage() -> Usage | UnsetType | None:
        if options.continuous_usage_stats:
            return answer.usage()
        return None if options.include_usage else UNSET

    try:
        for opening in answer.opening():
            yield event(answer.chunk([opening], usage()))
        async for choice, output in answer.outputs():
            if not answer.shows(choice, output):
                continue
            delta = await answer.delta(choice, output)
            if delta is not None:
                yield event(answer.chunk([delta], usage()))
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
