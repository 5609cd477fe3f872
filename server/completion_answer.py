"""CompletionAnswer: outputs as choices of /v1/completions, with echo, log-probabilities and ids."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from deltaserve.engine.output_processor import TextLogprob, TextOutput

from .answer import Answer, ChoiceState
from .echo import PromptEcho, finite, joined, vllm_prompt_logprobs
from .protocol import Choice, Completion, Logprobs, Usage

MANY = 1024
"""Log-probabilities that are put into words in a thread."""


@dataclass
class CompletionAnswer(Answer):
    """`echoes`: of each choice, None without `echo`."""

    echoes: list[PromptEcho | None]

    def shows(self, choice: ChoiceState, output: TextOutput) -> bool:
        if output.text or output.finish_reason:
            return True
        shown = self.shown
        begins = not choice.begun and (
            self.echoes[choice.index] is not None or shown.prompt_logprobs is not None
        )
        return bool(
            begins
            or (output.logprobs and shown.logprobs is not None)
            or (output.token_ids and shown.token_ids)
        )

    async def delta(self, choice: ChoiceState, output: TextOutput) -> Choice:
        return await self.choice(choice, (output,))

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
        if self.echoes[choice.index] is not None or not choice.begun:
            self._add_prompt(result, choice, outputs)
            choice.begun = True
        return result

    def _add_prompt(
        self, result: Choice, choice: ChoiceState, outputs: Sequence[TextOutput]
    ) -> None:
        """What was asked for of the prompt; of later chunks, the offsets behind an echo."""
        shown, echo = self.shown, self.echoes[choice.index]
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

    def whole(self, choices: list[Choice], usage: Usage) -> Completion:
        return self.chunk(choices, usage)


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
