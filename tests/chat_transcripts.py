"""Random outputs of a Qwen3.5 chat model, each with the message that it means."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deltaserve.server.reasoning import MessageDelta, MessageRouter
from deltaserve.server.tool_arguments import ToolParameters

SCHEMA: dict[str, Any] = {
    "type": "object",
    "$defs": {"place": {"type": "object", "properties": {"x": {"type": "number"}}}},
    "properties": {
        "text": {"type": "string"},
        "code": {"type": "string"},
        "count": {"type": "integer"},
        "ratio": {"type": "number"},
        "flag": {"type": "boolean"},
        "items": {"type": "array", "items": {"type": "string"}},
        "where": {"$ref": "#/$defs/place"},
        "nothing": {"type": "null"},
        "unit": {"enum": ["C", "F", 5]},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    },
}
TOOLS = {"f": ToolParameters(SCHEMA), "get_weather": ToolParameters(SCHEMA)}
_WORDS = [
    "sun", "<", ">", "a < b", "</", "<think", "<tool", "</parameter", "<function=", "\n", "\n\n",
    '"', "'", "\\", "\t", "\u4e2d\u6587", "\U0001f600", "\u2603", "{", "}", "&lt;", "</param>",
    "<parameter", "</p>", "x</parameter>y", "if (a</function>b)", "  ", "</tool_call", "end",
]  # fmt: skip


@dataclass
class Message:
    reasoning: str = ""
    content: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    def add(self, delta: MessageDelta) -> None:
        self.reasoning += delta.reasoning
        self.content += delta.content
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(self.calls) and call.id
                self.calls.append((call.name, ""))
            name, arguments = self.calls[call.index]
            self.calls[call.index] = (name, arguments + call.arguments)

    @property
    def values(self) -> list[tuple[str, Any]]:
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def routed(
    pieces: list[str],
    reasoning: bool,
    tools: Mapping[str, ToolParameters] | None = TOOLS,
    truncated: bool = False,
    max_calls: int | None = None,
) -> Message:
    router = MessageRouter(reasoning, tools, max_calls)
    message = Message()
    for piece in pieces:
        message.add(router.push(piece))
    message.add(router.finish(truncated))
    assert router.num_calls == len(message.calls)
    return message


@dataclass
class Transcript:
    """`text` is what a model writes, the rest what it means."""

    text: str
    reasoning: bool
    message: Message
    values: list[tuple[str, dict[str, Any]]]


def words(rng: random.Random, most: int) -> str:
    return "".join(rng.choice(_WORDS) for _ in range(rng.randint(0, most)))


def value(rng: random.Random, name: str) -> tuple[str, Any]:
    """(as the model writes it, what it is)"""
    if name in ("text", "code"):
        text = words(rng, 4)
        return text, text
    if name == "count":
        number = rng.randint(-(10**9), 10**9)
        return str(number), number
    if name == "ratio":
        ratio = rng.choice([0.5, -1e-7, 3, 2.25])
        return json.dumps(ratio), ratio
    if name == "flag":
        flag = rng.random() < 0.5
        return rng.choice([json.dumps(flag), str(flag)]), flag
    if name == "items":
        items = [words(rng, 3) for _ in range(rng.randint(0, 3))]
        return json.dumps(items, ensure_ascii=rng.random() < 0.5), items
    if name == "where":
        place = {"x": rng.randint(-9, 9) / 8, "note": words(rng, 2)}
        return json.dumps(place, indent=rng.choice([None, 1])), place
    if name == "unit":
        unit = rng.choice(["C", "F", 5])
        return str(unit), unit
    if name == "maybe" and rng.random() < 0.5:
        return "7", 7
    return "null", None


def call(rng: random.Random) -> tuple[str, str, dict[str, Any]]:
    function = rng.choice([*TOOLS])
    arguments: dict[str, Any] = {}
    text = f"<tool_call>\n<function={function}>\n"
    names = list(SCHEMA["properties"])
    for name in rng.sample(names, rng.randint(0, 3)):
        written, arguments[name] = value(rng, name)
        text += f"<parameter={name}>\n{written}\n</parameter>\n"
    return text + "</function>\n</tool_call>", function, arguments


def transcript(rng: random.Random) -> Transcript:
    reasoning = rng.random() < 0.6
    text, message = "", Message()
    values: list[tuple[str, dict[str, Any]]] = []
    within = reasoning and rng.random() < 0.3
    if reasoning:
        message.reasoning = words(rng, 4).strip()
        text = message.reasoning + ("\n" if within else "\n</think>\n\n")
    if not within:
        message.content = words(rng, 4)
        if reasoning:
            message.content = message.content.lstrip()
        text += message.content
    num_calls = rng.choice([0, 1, 1, 2]) if not within else rng.randint(1, 2)
    if num_calls:
        message.content = message.content.rstrip() if message.content.strip() else ""
        text += "\n\n" if message.content else ""
    for number in range(num_calls):
        text += "\n" if number else ""
        written, function, arguments = call(rng)
        text += written
        values.append((function, arguments))
        if within and number == 0 and rng.random() < 0.5:
            text += "\n</think>\n"
    if num_calls and rng.random() < 0.3:
        after = words(rng, 4).strip() + "."
        text += "\n\n" + after
        message.content += ("\n\n" if message.content else "") + after
    return Transcript(text, reasoning, message, values)
