"""ChatAnswer: outputs as messages of /v1/chat/completions, whole or as deltas that add up to it."""

from __future__ import annotations

import asyncio
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from msgspec import UNSET, UnsetType

from deltaserve.engine.output_processor import TextLogprob, TextOutput
from deltaserve.engine.sequence import FinishReason

from .answer import Answer, ChoiceState
from .chat_protocol import (
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatLogprobs,
    ChatMessage,
    ChunkChoice,
    Delta,
    FunctionCall,
    FunctionDelta,
    TokenLogprob,
    ToolCall,
    ToolCallDelta,
    TopLogprob,
)
from .echo import finite, vllm_prompt_logprobs
from .protocol import CompletionTokensDetails, PromptLogprobs, Usage
from .reasoning import CallDelta, MessageDelta, MessageRouter


@dataclass
class ChatAnswer(Answer):
    """`routers`: one a choice. `shown.logprobs` is how many alternatives are shown."""

    routers: list[MessageRouter]
    _num_chunks: int = field(default=0, kw_only=True)
    _prompt_logprobs: PromptLogprobs | UnsetType = field(default=UNSET, kw_only=True)

    def __post_init__(self) -> None:
        for choice, router in zip(self.choices, self.routers, strict=True):
            if router.in_reasoning:
                choice.processor.token_starts = array("I")

    def usage(self) -> Usage:
        """Also how many tokens begin within the reasoning, as far as it is known to go."""
        usage = super().usage()
        num_tokens = 0
        for choice, router in zip(self.choices, self.routers, strict=True):
            starts = choice.processor.token_starts
            num_tokens += bisect_left(starts or (), router.num_reasoning_chars)
        usage.completion_tokens_details = CompletionTokensDetails(num_tokens)
        return usage

    def opening(self) -> list[msgspec.Struct]:
        delta = Delta(role="assistant", content="")
        return [ChunkChoice(choice.index, delta) for choice in self.choices]

    def shows(self, choice: ChoiceState, output: TextOutput) -> bool:
        return bool(
            output.text
            or output.finish_reason
            or (output.logprobs and self.shown.logprobs is not None)
            or (output.token_ids and self.shown.token_ids)
        )

    async def delta(self, choice: ChoiceState, output: TextOutput) -> ChunkChoice | None:
        new = self._routed(choice, (output,))
        logprobs = self._logprobs((output,))
        token_ids = list(output.token_ids) if self.shown.token_ids else UNSET
        if not (new or output.finish_reason or logprobs or token_ids):
            return None
        delta = Delta()
        if new.content:
            delta.content = new.content
        if new.reasoning:
            delta.reasoning_content = delta.reasoning = new.reasoning
        if new.calls:
            delta.tool_calls = [_call_delta(call) for call in new.calls]
        reason = self._finish_reason(choice, output.finish_reason)
        return ChunkChoice(choice.index, delta, logprobs, reason, output.stop_reason, token_ids)

    async def choice(self, choice: ChoiceState, outputs: Sequence[TextOutput]) -> ChatChoice:
        routed = self._routed(choice, outputs)
        message = ChatMessage(content=routed.content)
        if routed.reasoning:
            message.reasoning_content = message.reasoning = routed.reasoning
        if routed.calls:
            message.tool_calls = _whole_calls(routed.calls)
        if not routed.content and (routed.reasoning or routed.calls):
            message.content = None
        if choice.first_of_prompt and self.shown.prompt_logprobs is not None:
            entries = tuple(entry for output in outputs for entry in output.prompt_logprobs)
            ids, num_top = choice.prompt_ids, self.shown.prompt_logprobs
            self._prompt_logprobs = await asyncio.to_thread(
                vllm_prompt_logprobs, self.tokenizer, ids, entries, num_top
            )
        last = outputs[-1]
        return ChatChoice(
            index=choice.index,
            message=message,
            logprobs=self._logprobs(outputs),
            finish_reason=self._finish_reason(choice, last.finish_reason),
            stop_reason=last.stop_reason,
            token_ids=(
                [id_ for output in outputs for id_ in output.token_ids]
                if self.shown.token_ids
                else UNSET
            ),
        )

    def chunk(self, choices: list[ChunkChoice], usage: Usage | UnsetType | None) -> ChatChunk:
        chunk = ChatChunk(self.id, self.created, self.model, choices, usage)
        if self._num_chunks == 0 and self.shown.token_ids:
            chunk.prompt_token_ids = self.choices[0].prompt_ids
        self._num_chunks += 1
        return chunk

    def whole(self, choices: list[ChatChoice], usage: Usage) -> ChatCompletion:
        whole = ChatCompletion(self.id, self.created, self.model, choices, usage)
        whole.prompt_logprobs = self._prompt_logprobs
        if self.shown.token_ids:
            whole.prompt_token_ids = self.choices[0].prompt_ids
        return whole

    def _routed(self, choice: ChoiceState, outputs: Sequence[TextOutput]) -> MessageDelta:
        router = self.routers[choice.index]
        new = router.push("".join([output.text for output in outputs]))
        reason = outputs[-1].finish_reason
        if reason is not None:
            new.add(router.finish(truncated=reason is not FinishReason.STOP))
        return new

    def _finish_reason(self, choice: ChoiceState, reason: FinishReason | None) -> str | None:
        if reason is FinishReason.STOP and self.routers[choice.index].num_calls:
            return "tool_calls"
        return None if reason is None else reason.value

    def _logprobs(self, outputs: Sequence[TextOutput]) -> ChatLogprobs | None:
        if self.shown.logprobs is None:
            return None
        entries = [self._logprob(item) for output in outputs for item in output.logprobs]
        return ChatLogprobs(entries) if entries else None

    def _logprob(self, item: TextLogprob) -> TokenLogprob:
        bytes_of = self.tokenizer.token_bytes
        return TokenLogprob(
            token=item.token,
            logprob=finite(item.logprob),
            bytes=list(bytes_of(item.token_id)),
            top_logprobs=[
                TopLogprob(token, finite(value), list(bytes_of(id_)))
                for (token, value), id_ in zip(item.top, item.top_ids, strict=True)
            ],
        )


def _call_delta(call: CallDelta) -> ToolCallDelta:
    if call.name is None or call.id is None:
        return ToolCallDelta(call.index, FunctionDelta(UNSET, call.arguments))
    return ToolCallDelta(call.index, FunctionDelta(call.name, call.arguments), call.id, "function")


def _whole_calls(deltas: Sequence[CallDelta]) -> list[ToolCall]:
    calls: list[ToolCall] = []
    for delta in deltas:
        if delta.name is not None and delta.id is not None:
            calls.append(ToolCall(id=delta.id, function=FunctionCall(delta.name, "")))
        calls[delta.index].function.arguments += delta.arguments
    return calls
