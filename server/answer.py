"""Answer: the admitted requests of one completion request, and their outputs as choices.

Owns what each choice shows (echo, log-probabilities, token ids) and usage. Whether it goes out
whole or as a stream is completions.py's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET

from deltaserve.engine.engine_request import EngineRequest, EngineUnavailable
from deltaserve.engine.output_processor import OutputProcessor, TextLogprob, TextOutput
from deltaserve.engine.sequence import FinishReason, RequestOutput
from deltaserve.engine.step_outputs import NO_TOKEN_LEFT
from deltaserve.engine.tokenizer import Tokenizer

from .echo import PromptEcho, finite, joined, vllm_prompt_logprobs
from .errors import ApiError
from .protocol import Choice, Completion, Logprobs, PromptTokensDetails, Usage

MANY = 1024
"""Log-probabilities that are put into words in a thread."""


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
    echo: PromptEcho | None
    num_cached_tokens: int = 0
    begun: bool = False
    """Whether what concerns the prompt has been shown."""


@dataclass
class Answer:
    id: str
    model: str
    tokenizer: Tokenizer
    shown: Shown
    wake: asyncio.Event
    choices: list[ChoiceState]
    created: int = field(default_factory=lambda: int(time.time()))

    def close(self) -> None:
        for choice in self.choices:
            choice.request.close()

    async def outputs(self) -> AsyncIterator[tuple[ChoiceState, TextOutput]]:
        """What is new of a choice, until all choices have ended. Raises ApiError."""
        running = list(self.choices)
        while running:
            await self.wake.wait()
            self.wake.clear()
            for choice in running:
                output = _take(choice.request)
                if output is None:
                    continue
                text = choice.processor.process(output)
                choice.num_cached_tokens += text.num_cached_tokens
                if text.finish_reason is FinishReason.STOP:
                    choice.request.close(FinishReason.STOP)
                if text.error == NO_TOKEN_LEFT:
                    raise ApiError(400, text.error)
                if text.finish_reason is FinishReason.ERROR:
                    raise ApiError(500, f"the request failed: {text.error}")
                yield choice, text
            running = [choice for choice in running if choice.processor.finish_reason is None]

    def shows(self, choice: ChoiceState, output: TextOutput) -> bool:
        """Whether a chunk of this output would say anything."""
        if output.text or output.finish_reason:
            return True
        shown = self.shown
        return bool(
            (output.logprobs and shown.logprobs is not None)
            or (output.token_ids and shown.token_ids)
            or (not choice.begun and (choice.echo or shown.prompt_logprobs is not None))
        )

    async def choice(self, choice: ChoiceState, outputs: Sequence[TextOutput]) -> Choice:
        """Outputs of a choice as one; the first time with what was asked for of the prompt."""
        if not choice.begun and sum(len(output.prompt_logprobs) for output in outputs) > MANY:
            return await asyncio.to_thread(self._choice, choice, outputs)
        return self._choice(choice, outputs)

    def _choice(self, choice: ChoiceState, outputs: Sequence[TextOutput]) -> Choice:
        last, shown = outputs[-1], self.shown
        result = Choice(
            index=choice.index,
            text="".join([output.text for output in outputs]),
            logprobs=None,
            finish_reason=last.finish_reason.value if last.finish_reason else None,
            stop_reason=last.stop_reason,
        )
        if shown.logprobs is not None:
            entries = [entry for output in outputs for entry in output.logprobs]
            result.logprobs = _logprobs(entries) if entries else None
        if shown.token_ids:
            result.token_ids = [id_ for output in outputs for id_ in output.token_ids]
        if choice.echo is not None or not choice.begun:
            self._add_prompt(result, choice, outputs)
            choice.begun = True
        return result

    def _add_prompt(
        self, result: Choice, choice: ChoiceState, outputs: Sequence[TextOutput]
    ) -> None:
        """What was asked for of the prompt; of later chunks, the offsets behind an echo."""
        shown, echo = self.shown, choice.echo
        entries = tuple(entry for output in outputs for entry in output.prompt_logprobs)
        if echo is not None and shown.logprobs is not None:
            nothing = Logprobs([], [], [], [])
            before = nothing if choice.begun else echo.logprobs(entries, shown.logprobs)
            result.logprobs = joined(before, result.logprobs or nothing, len(echo.text))
        if choice.begun:
            return
        if echo is not None:
            result.text = echo.text + result.text
        if shown.token_ids:
            result.prompt_token_ids = choice.prompt_ids
        if shown.prompt_logprobs is not None:
            result.prompt_logprobs = vllm_prompt_logprobs(
                self.tokenizer, choice.prompt_ids, entries, shown.prompt_logprobs
            )

    def chunk(self, choices: list[Choice], usage: Usage | msgspec.UnsetType | None) -> Completion:
        return Completion(self.id, self.created, self.model, choices, usage)

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


def _logprobs(items: Sequence[TextLogprob]) -> Logprobs:
    """The chosen token is among the alternatives of its position, whatever its rank."""
    tops: list[dict[str, float] | None] = []
    for item in items:
        top: dict[str, float] = {}
        for token, value in (*item.top, (item.token, item.logprob)):
            top.setdefault(token, finite(value))
        tops.append(top)
    return Logprobs(
        tokens=[item.token for item in items],
        token_logprobs=[finite(item.logprob) for item in items],
        top_logprobs=tops,
        text_offset=[item.text_offset for item in items],
    )
