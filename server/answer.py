"""Answer: the admitted requests of one HTTP request, and their outputs as chunks of its answer.

Owns what all endpoints share: taking outputs, usage, and the form of a chunk as something that
`reply` can send whole or as a stream. What a choice looks like is CompletionAnswer's and
ChatAnswer's.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import UNSET

from deltaserve.engine.engine_request import EngineRequest, EngineUnavailable
from deltaserve.engine.output_processor import OutputProcessor, TextOutput
from deltaserve.engine.sequence import FinishReason, RequestOutput, TokenLogprobs
from deltaserve.engine.tokenizer import Tokenizer

from .errors import ApiError
from .protocol import PromptTokensDetails, Usage


@dataclass(frozen=True)
class Shown:
    """What was asked for beside the text; None and False are not."""

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    token_ids: bool = False


@dataclass
class ChoiceState:
    """One choice on its way. `index` is prompt index times n plus its number among n."""

    index: int
    first_of_prompt: bool
    request: EngineRequest
    processor: OutputProcessor
    prompt_ids: list[int]
    first: ChoiceState | None = None
    """The choice whose log-probabilities of the prompt are this one's too."""
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    """None before the first output."""
    num_cached_tokens: int = 0
    begun: bool = False
    """Whether what concerns the prompt has been shown."""


@dataclass
class Answer(ABC):
    id: str
    model: str
    tokenizer: Tokenizer
    shown: Shown
    wake: asyncio.Event
    choices: list[ChoiceState]
    created: int = field(default_factory=lambda: int(time.time()), kw_only=True)

    def opening(self) -> list[msgspec.Struct]:
        """Choices that a stream shows, a chunk each, before any output."""
        return []

    @abstractmethod
    def shows(self, choice: ChoiceState, output: TextOutput) -> bool:
        """Whether a chunk of this output may say anything."""

    @abstractmethod
    async def delta(self, choice: ChoiceState, output: TextOutput) -> msgspec.Struct | None:
        """An output as a choice of a chunk; None where there is nothing to say after all."""

    @abstractmethod
    async def choice(self, choice: ChoiceState, outputs: Sequence[TextOutput]) -> msgspec.Struct:
        """All outputs of a choice as one of a whole answer."""

    @abstractmethod
    def chunk(self, choices: list[Any], usage: Usage | msgspec.UnsetType | None) -> msgspec.Struct:
        """A part of a stream, with what `delta` gave."""

    @abstractmethod
    def whole(self, choices: list[Any], usage: Usage) -> msgspec.Struct:
        """The answer, with what `choice` gave."""

    def close(self) -> None:
        for choice in self.choices:
            choice.request.close()

    async def outputs(self) -> AsyncIterator[tuple[ChoiceState, TextOutput]]:
        """What is new of a choice, until all choices have ended. Raises ApiError."""
        running = list(self.choices)
        while running:
            await self.wake.wait()
            self.wake.clear()
            for choice in running:  # the first choice of a prompt before the others
                if choice.first is not None and choice.first.prompt_logprobs is None:
                    continue
                output = _take(choice.request)
                if output is None:
                    continue
                text = choice.processor.process(output)
                if choice.prompt_logprobs is None:
                    choice.prompt_logprobs = text.prompt_logprobs
                    if choice.first is not None:
                        text = text._replace(prompt_logprobs=choice.first.prompt_logprobs or ())
                choice.num_cached_tokens += text.num_cached_tokens
                if text.finish_reason is FinishReason.STOP:
                    choice.request.close(FinishReason.STOP)
                if text.finish_reason is not FinishReason.ERROR:
                    yield choice, text
                    continue
                if text.text or text.token_ids:  # what came before the error, taken with it
                    yield choice, text._replace(finish_reason=None)
                if text.error is not None and text.error_param is not None:
                    raise ApiError(400, text.error, text.error_param)
                raise ApiError(500, f"the request failed: {text.error}")
            running = [choice for choice in running if choice.processor.finish_reason is None]

    def usage(self) -> Usage:
        """So far. A prompt counts once, whatever n."""
        firsts = [choice for choice in self.choices if choice.first_of_prompt]
        prompt = sum(choice.processor.num_prompt_tokens for choice in firsts)
        output = sum(choice.processor.num_output_tokens for choice in self.choices)
        cached = sum(choice.num_cached_tokens for choice in firsts)
        details = PromptTokensDetails(cached) if cached else UNSET
        return Usage(prompt, output, prompt + output, details)

    @property
    def finish_reasons(self) -> str:
        """Of all choices, for the log."""
        reasons = {c.processor.finish_reason for c in self.choices if c.processor.finish_reason}
        return ",".join(sorted(reason.value for reason in reasons))


def _take(request: EngineRequest) -> RequestOutput | None:
    try:
        return request.take()
    except EngineUnavailable as error:
        raise ApiError(503, str(error)) from None
