r"""MessageRouter: a model's text in pieces -> reasoning, content and tool calls in pieces.

    prompt ...<think>\n | reasoning </think> content <tool_call>...</tool_call> content
                        ^ the output starts here

The prompt decides whether the output begins within the reasoning (`reasoning_is_open`); without it
all is content, `</think>` too. A `<tool_call>` ends the reasoning as well. What comes out, joined,
does not depend on how the text was cut: a piece that may still become a tag is held back. White
space around tags is the template's, not the message's; between texts before and after a call some
of it remains.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field

from deltaserve.engine.output_processor import overlap

from .tool_arguments import ToolParameters
from .tool_calls import OPEN, Match, ToolCallParser, opener, tool_parameters

THINK, THINK_END = "<think>", "</think>"
TURN = "<|im_start|>"


def reasoning_is_open(prompt: str) -> bool:
    """Whether what follows `prompt`, a rendered chat, is reasoning until it says otherwise."""
    turn = prompt[prompt.rfind(TURN) + 1 :]
    return turn.rfind(THINK) > turn.rfind(THINK_END)


@dataclass
class CallDelta:
    """More of a tool call. `id` and `name` are there in its first one."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: str = ""


@dataclass
class MessageDelta:
    """More of a message."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)

    def add(self, more: MessageDelta) -> None:
        self.reasoning += more.reasoning
        self.content += more.content
        for call in more.calls:
            self.add_call(call)

    def add_call(self, call: CallDelta) -> None:
        if self.calls and self.calls[-1].index == call.index:
            self.calls[-1].arguments += call.arguments
        else:
            self.calls.append(call)


class _Channel:
    """One kind of text, without the white space at its edges."""

    def __init__(self, strip: bool) -> None:
        self.empty = True
        self._strip = strip  # white space that comes next is at an edge
        self._space = ""

    def push(self, text: str, more_tags: bool) -> str:
        """What can be released; without `more_tags` nothing but a beginning is an edge."""
        blank = not text.strip()
        kept = text.rstrip() if more_tags or (blank and self._strip) else text
        if not kept:
            self._space += text
            return ""
        out = self._space + kept
        if self._strip and self.empty:
            out = out.lstrip()
        self._space, self._strip, self.empty = text[len(kept) :], False, False
        return out

    def edge(self) -> None:
        """A tag stands here."""
        self._space, self._strip = "", True

    def finish(self) -> str:
        """White space at the end of the output, unless a tag stood before it."""
        return "" if self._strip else self._space


class MessageRouter:
    """Of one choice. `tools`: those that may be called, None where calls are text like any other.
    `max_calls`: further ones are left out (None: no limit).

    `num_reasoning_chars`: how far the output, from its beginning, is known to be reasoning; white
    space counts, the tag that ends it does not.
    """

    def __init__(
        self,
        reasoning: bool,
        tools: Mapping[str, ToolParameters] | None,
        max_calls: int | None = None,
    ) -> None:
        self._tools = tools
        self._max_calls = max_calls
        self.num_calls = 0
        self.num_reasoning_chars = 0
        self._reasoning = _Channel(strip=True)
        self._content = _Channel(strip=reasoning)
        self._in_reasoning = reasoning
        self._end_expected = reasoning  # there was no THINK_END so far
        self._buffer = ""
        self._call: ToolCallParser | None = None
        self._call_shown = False

    @property
    def in_reasoning(self) -> bool:
        return self._in_reasoning

    @property
    def _channel(self) -> _Channel:
        return self._reasoning if self._in_reasoning else self._content

    def push(self, text: str) -> MessageDelta:
        delta = MessageDelta()
        self._buffer += text
        while self._step_call(delta) if self._call is not None else self._step_text(delta):
            pass
        return delta

    def finish(self, truncated: bool) -> MessageDelta:
        """What was held back. `truncated`: the output was cut, rather than ended by the model."""
        delta = MessageDelta()
        if self._call is not None:
            self._arguments(self._call.finish(truncated), delta)
            self._call = None
        elif self._tools is not None and self._buffer.startswith(OPEN):
            self._channel.edge()  # the beginning of a call is none
        else:
            self._text_until(len(self._buffer), delta)
        self._buffer = ""
        self._add(self._channel.finish(), delta)
        return delta

    def _tags(self) -> list[str]:
        tags = [] if self._tools is None else [OPEN]
        if self._end_expected:
            tags.append(THINK_END)
        if self._in_reasoning and self._reasoning.empty:
            tags.append(THINK)
        return tags

    def _step_text(self, delta: MessageDelta) -> bool:
        """Whether there may be more to do."""
        buffer, tags = self._buffer, self._tags()
        found = [(at, tag) for tag in tags if (at := buffer.find(tag)) >= 0]
        if not found:
            self._text_until(
                len(buffer) - max((overlap(buffer, tag) for tag in tags), default=0), delta
            )
            return False
        at, tag = min(found)
        if tag == OPEN:
            return self._open_call(at, delta)
        if tag == THINK and buffer[:at].strip():
            self._text_until(at + len(tag), delta)
            return True
        self._text_until(at, delta)
        self._buffer = self._buffer[len(tag) :]
        self._channel.edge()
        if tag == THINK:
            self.num_reasoning_chars += len(tag)
        if tag == THINK_END:
            self._in_reasoning = self._end_expected = False
            self._content.edge()
        return True

    def _open_call(self, at: int, delta: MessageDelta) -> bool:
        matched, name, end = opener(self._buffer, at)
        if matched is not Match.YES:
            self._text_until(at if matched is Match.MAYBE else at + len(OPEN), delta)
            return matched is Match.NO
        self._text_until(at, delta)
        self._buffer = self._buffer[end - at :]
        self._channel.edge()
        self._in_reasoning = False
        self._content.edge()
        assert self._tools is not None
        self._call = ToolCallParser(tool_parameters(self._tools, name))
        self._call_shown = self._max_calls is None or self.num_calls < self._max_calls
        if self._call_shown:
            id_ = f"call_{uuid.uuid4().hex[:24]}"
            delta.calls.append(CallDelta(self.num_calls, id_, name))
            self.num_calls += 1
        return True

    def _step_call(self, delta: MessageDelta) -> bool:
        assert self._call is not None
        arguments, rest = self._call.push(self._buffer)
        self._arguments(arguments, delta)
        self._buffer = rest or ""
        if rest is None:
            return False
        self._call = None
        return True

    def _arguments(self, text: str, delta: MessageDelta) -> None:
        if not self._call_shown or not text:
            return
        delta.add_call(CallDelta(self.num_calls - 1, arguments=text))

    def _text_until(self, end: int, delta: MessageDelta) -> None:
        text, self._buffer = self._buffer[:end], self._buffer[end:]
        if self._in_reasoning:
            self.num_reasoning_chars += len(text)
        self._add(self._channel.push(text, bool(self._tags())), delta)

    def _add(self, text: str, delta: MessageDelta) -> None:
        if self._in_reasoning:
            delta.reasoning += text
        else:
            delta.content += text
