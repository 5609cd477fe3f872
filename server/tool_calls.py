r"""ToolCallParser: one call in Qwen3.5's XML form -> JSON of its arguments, both in pieces.

    <tool_call>\n<function=NAME>\n<parameter=P>\nVALUE\n</parameter>\n...</function>\n</tool_call>
                               ^ starts here                                        ends here ^

What comes out, joined, does not depend on how the text was cut. A string goes out as it comes,
other values when they are complete. VALUE may hold anything: its end is the `</parameter>` that
another parameter or the end of the function follows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum, auto

from deltaserve.engine.output_processor import overlap

from .tool_arguments import ToolParameters, dumps

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MAX_NAME_CHARS = 256
_NAME = re.compile(rf"[^<>\n]{{0,{MAX_NAME_CHARS}}}")
_SPACE = re.compile(r"\s*")
_VALUE_ENDS = (PARAMETER_END, FUNCTION_END)
_FOLLOWERS = {PARAMETER_END: (PARAMETER, FUNCTION_END, CLOSE), FUNCTION_END: (CLOSE,)}


class Match(Enum):
    NO = auto()
    MAYBE = auto()  # more text decides
    YES = auto()


def opener(text: str, at: int) -> tuple[Match, str, int]:
    """(whether a call begins at `at`, where OPEN stands; the function's name; where it ends)."""
    at = _skip_space(text, at + len(OPEN))
    matched = _starts(text, at, (FUNCTION,))
    if matched is not Match.YES:
        return matched, "", at
    return _name(text, at + len(FUNCTION))


def is_name(text: str) -> bool:
    """Whether a tag can hold it, of a function or a parameter."""
    return _name(text + ">", 0) == (Match.YES, text, len(text) + 1)


class _State(Enum):
    BETWEEN = auto()  # parameters
    VALUE_START = auto()
    VALUE = auto()
    AFTER = auto()  # the function
    DONE = auto()


class ToolCallParser:
    """Of one call, from behind `<function=NAME>`. `parameters` types the values."""

    def __init__(self, parameters: ToolParameters) -> None:
        self._parameters = parameters
        self._state = _State.BETWEEN
        self._buffer = ""
        self._scanned = 0  # of the buffer: no value's end begins before
        self._out: list[str] = []
        self._name = ""
        self._is_text = False
        self._pieces: list[str] = []  # of a value that is no string
        self._num_parameters = 0

    def push(self, text: str) -> tuple[str, str | None]:
        """(more of the arguments' JSON, what follows the call or None while it goes on)."""
        self._buffer += text
        steps = {
            _State.BETWEEN: self._between,
            _State.VALUE_START: self._value_start,
            _State.VALUE: self._value,
            _State.AFTER: self._after,
        }
        while self._state is not _State.DONE and steps[self._state]():
            pass
        rest = self._buffer if self._state is _State.DONE else None
        return self._take(), rest

    def finish(self, truncated: bool) -> str:
        """The text has ended within the call. What is `truncated` stays open, so that it is seen to
        be; else the model is taken to have meant the call to end here."""
        if self._state is _State.VALUE_START:
            self._begin_value("")
        if self._state is _State.VALUE:
            ends = [self._buffer.find(tag, self._scanned) for tag in _VALUE_ENDS]
            if max(ends) >= 0:
                self._end_value(min(end for end in ends if end >= 0))
            else:
                kept = len(self._buffer) - self._held()
                if self._is_text or not truncated:
                    self._write(self._buffer[:kept])
                if not truncated:
                    self._close_value()
        if not truncated and self._state not in (_State.AFTER, _State.DONE):
            self._end_function()
        self._state = _State.DONE
        return self._take()

    def _take(self) -> str:
        out, self._out = "".join(self._out), []
        return out

    def _consume(self, end: int) -> None:
        self._buffer, self._scanned = self._buffer[end:], 0

    def _between(self) -> bool:
        """What stands between parameters and is no tag is dropped."""
        at = self._buffer.find("<")
        if at < 0:
            self._consume(len(self._buffer))
            return False
        self._consume(at)
        matched = _starts(self._buffer, 0, (PARAMETER,))
        if matched is Match.YES:
            matched, name, end = _name(self._buffer, len(PARAMETER))
            if matched is Match.YES:
                self._begin_parameter(name)
                self._consume(end)
                return True
        ends = _starts(self._buffer, 0, (FUNCTION_END, CLOSE, OPEN))
        if ends is Match.YES:
            self._end_function()
            if self._buffer.startswith(FUNCTION_END):
                self._consume(len(FUNCTION_END))
            return True
        if Match.MAYBE in (matched, ends):
            return False
        self._consume(1)
        return True

    def _begin_parameter(self, name: str) -> None:
        self._name, self._is_text = name, self._parameters.is_text(name)
        self._out.append("{" if self._num_parameters == 0 else ", ")
        self._out.append(dumps(name) + ": ")
        self._num_parameters += 1
        self._state = _State.VALUE_START

    def _value_start(self) -> bool:
        """One line break after the tag is not the value's."""
        if not self._buffer:
            return False
        self._begin_value("\n")
        return True

    def _begin_value(self, prefix: str) -> None:
        self._consume(len(prefix) if prefix and self._buffer.startswith(prefix) else 0)
        if self._is_text:
            self._out.append('"')
        self._pieces = []
        self._state = _State.VALUE

    def _value(self) -> bool:
        while True:
            found = [
                (at, tag)
                for tag in _VALUE_ENDS
                if (at := self._buffer.find(tag, self._scanned)) >= 0
            ]
            if not found:
                kept = len(self._buffer) - self._held()
                self._write(self._buffer[:kept])
                self._consume(kept)
                return False
            at, tag = min(found)
            after = _skip_space(self._buffer, at + len(tag))
            matched = _starts(self._buffer, after, _FOLLOWERS[tag])
            if matched is Match.YES:
                self._end_value(at)
                return True
            if matched is Match.MAYBE:
                self._scanned = at
                return False
            self._scanned = at + len(tag)

    def _held(self) -> int:
        """How much of the buffer's end may belong to the end of the value."""
        tail = self._buffer[self._scanned :]
        return max(overlap(tail, prefix + tag) for tag in _VALUE_ENDS for prefix in ("", "\n"))

    def _write(self, text: str) -> None:
        if self._is_text:
            self._out.append(dumps(text)[1:-1])
        else:
            self._pieces.append(text)

    def _end_value(self, at: int) -> None:
        """`at`: where the end tag stands; one line break before it is not the value's."""
        self._write(self._buffer[: at - (self._buffer[at - 1 : at] == "\n")])
        if self._buffer.startswith(PARAMETER_END, at):
            at += len(PARAMETER_END)
        self._consume(at)
        self._close_value()

    def _close_value(self) -> None:
        if self._is_text:
            self._out.append('"')
        else:
            self._out.append(self._parameters.value(self._name, "".join(self._pieces)))
        self._state = _State.BETWEEN

    def _end_function(self) -> None:
        self._out.append("}" if self._num_parameters else "{}")
        self._state = _State.AFTER

    def _after(self) -> bool:
        """The call's own end tag belongs to it."""
        at = _skip_space(self._buffer, 0)
        matched = _starts(self._buffer, at, (CLOSE,))
        if matched is Match.MAYBE:
            return False
        if matched is Match.YES:
            self._consume(at + len(CLOSE))
        self._state = _State.DONE
        return True


def tool_parameters(tools: Mapping[str, ToolParameters], name: str) -> ToolParameters:
    """Of a tool that the request may not have."""
    return tools.get(name) or ToolParameters(None)


def _skip_space(text: str, at: int) -> int:
    space = _SPACE.match(text, at)
    assert space is not None
    return space.end()


def _starts(text: str, at: int, tags: tuple[str, ...]) -> Match:
    """Whether one of `tags` stands at `at`."""
    if text.startswith(tags, at):
        return Match.YES
    left = text[at : at + max(map(len, tags))]
    return Match.MAYBE if any(tag.startswith(left) for tag in tags) else Match.NO


def _name(text: str, at: int) -> tuple[Match, str, int]:
    """A name at `at`, with the `>` that ends it."""
    found = _NAME.match(text, at)
    assert found is not None
    end = found.end()
    if end == len(text) and end - at <= MAX_NAME_CHARS:
        return Match.MAYBE, "", end
    if text[end : end + 1] != ">" or not found[0].strip():
        return Match.NO, "", end
    return Match.YES, found[0].strip(), end + 1
