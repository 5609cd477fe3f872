"""The grammar of a chat's answer: what its content must be, which tools it must call, or either."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from deltaserve.engine.grammar import JSON_WHITESPACE, Grammar

from .chat_protocol import ChatBody, ToolChoice
from .json_body import invalid
from .structured import grammar_of, make_grammar
from .tool_grammar import tool_choice_grammar


def chat_grammar(
    fields: ChatBody,
    tools: Sequence[Mapping[str, Any]],
    choice: ToolChoice,
    start_after: tuple[int, ...],
) -> Grammar | None:
    """None where the answer is free. `start_after`: the ids that end the reasoning, which is free
    in any case. Where tools may be called and the content is to be JSON, it is one or the other.
    Raises ApiError 400."""
    content = grammar_of(fields, start_after)
    parallel = fields.parallel_tool_calls is not False
    if choice not in ("auto", "none"):
        if content is not None:
            raise invalid(content.field, f"{content.field}: not where tool_choice asks for a call")
        return tool_choice_grammar(tools, choice, parallel, start_after)
    if content is None or choice == "none":
        return content
    if content.kind != "json_schema":
        raise invalid(
            content.field, f"{content.field}: of a {content.kind}, not where tools may be called"
        )
    calls = tool_choice_grammar(tools, "required", parallel, start_after)
    assert calls is not None
    either = calls.text.replace("start: call", "start: content | call", 1)
    schema = json.loads(content.text)
    if isinstance(schema, dict):  # `true` is a schema too
        schema["x-guidance"] = {"whitespace_pattern": JSON_WHITESPACE}
    text = f"{either}\ncontent: %json {json.dumps(schema, ensure_ascii=False)}"
    return make_grammar("lark", text, start_after, content.field)
