"""Messages and tools of a chat: JSON -> what a chat template takes, and what is refused by name.

Texts stay as they are. Images, audio and files are refused: this server reads text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Raw

from .errors import ApiError
from .json_body import decode_field, invalid
from .prompts import SHORT_BYTES
from .tool_arguments import ToolParameters
from .tool_calls import MAX_NAME_CHARS

ROLES = ("system", "developer", "user", "assistant", "tool")
MAX_MESSAGES = 8192
MAX_TOOLS = 512
MAX_TOOLS_BYTES = 1 << 20


class ToolFunction(msgspec.Struct, forbid_unknown_fields=True):
    """Of a call that an assistant made: `arguments` is a JSON object, as text or as itself."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCallOfMessage(msgspec.Struct, forbid_unknown_fields=True):
    function: ToolFunction
    id: str | None = None
    type: str | None = None
    index: int | None = None


class Message(msgspec.Struct, forbid_unknown_fields=True):
    """Null means absent. `refusal` and the two after it are what an answer of OpenAI's may hold
    beside its text: accepted, no effect."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCallOfMessage] | None = None
    tool_call_id: str | None = None
    refusal: Any = None
    annotations: Any = None
    audio: None = None
    function_call: None = None


_messages: msgspec.json.Decoder[list[Raw]] = msgspec.json.Decoder(list[Raw])
_message: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)
_tools: msgspec.json.Decoder[list[dict[str, Any]]] = msgspec.json.Decoder(list[dict[str, Any]])
_object: msgspec.json.Decoder[dict[str, Any]] = msgspec.json.Decoder(dict[str, Any])

MESSAGES_SCHEMA: dict[str, Any] = {
    "type": "array",
    "description": f"at most {MAX_MESSAGES}",
    "minItems": 1,
    "items": {
        "type": "object",
        "required": ["role"],
        "additionalProperties": False,
        "properties": {
            "role": {"enum": [*ROLES]},
            "content": {
                "anyOf": [
                    {"type": ["string", "null"]},
                    {
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["type", "text"],
                            "additionalProperties": False,
                            "properties": {
                                "type": {"const": "text"},
                                "text": {"type": "string"},
                                "cache_control": {"description": "accepted, no effect"},
                            },
                        },
                    },
                ],
            },
            "name": {"type": ["string", "null"]},
            "reasoning_content": {"type": ["string", "null"]},
            "reasoning": {"type": ["string", "null"]},
            "tool_calls": {
                "type": ["array", "null"],
                "items": {
                    "type": "object",
                    "required": ["function"],
                    "additionalProperties": False,
                    "properties": {
                        "id": {"type": ["string", "null"]},
                        "type": {"enum": ["function", None]},
                        "index": {"type": ["integer", "null"]},
                        "function": {
                            "type": "object",
                            "required": ["name"],
                            "additionalProperties": False,
                            "properties": {
                                "name": {"type": "string"},
                                "arguments": {
                                    "type": ["string", "object", "null"],
                                    "description": "a JSON object, or its text",
                                },
                            },
                        },
                    },
                },
            },
            "tool_call_id": {"type": ["string", "null"]},
            "refusal": {"description": "accepted, no effect"},
            "annotations": {"description": "accepted, no effect"},
            "audio": {"type": "null"},
            "function_call": {"type": "null"},
        },
    },
}
TOOLS_SCHEMA: dict[str, Any] = {
    "type": ["array", "null"],
    "description": f"at most {MAX_TOOLS}",
    "items": {
        "type": "object",
        "required": ["type", "function"],
        "properties": {
            "type": {"const": "function"},
            "function": {
                "type": "object",
                "required": ["name"],
                "properties": {
                    "name": {
                        "type": "string",
                        "minLength": 1,
                        "maxLength": MAX_NAME_CHARS,
                        "pattern": r"^[^<>\s]+$",
                    },
                    "description": {"type": ["string", "null"]},
                    "parameters": {"type": ["object", "null"]},
                    "strict": {"type": ["boolean", "null"]},
                },
            },
        },
    },
}


async def read_messages(raw: Raw) -> list[dict[str, Any]]:
    """As the template takes them, at least one. Raises ApiError 400 that names the message."""
    data = bytes(raw)
    if len(data) <= SHORT_BYTES:
        return _read_messages(data)
    return await asyncio.to_thread(_read_messages, data)


def read_tools(raw: Raw | None) -> list[dict[str, Any]]:
    """As they were sent. Raises ApiError 400."""
    if raw is None:
        return []
    if len(memoryview(raw)) > MAX_TOOLS_BYTES:
        raise invalid("tools", f"tools: is longer than {MAX_TOOLS_BYTES} bytes")
    tools: list[dict[str, Any]] = decode_field(_tools, raw, "tools")
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"tools: at most {MAX_TOOLS}, got {len(tools)}")
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]")
    if len(tool_parameters_by_name(tools)) < len(tools):
        raise invalid("tools", "tools: two have the same name")
    return tools


def tool_parameters_by_name(tools: list[dict[str, Any]]) -> dict[str, ToolParameters]:
    functions: list[Mapping[str, Any]] = [tool["function"] for tool in tools]
    return {each["name"]: ToolParameters(each.get("parameters")) for each in functions}


def _check_tool(tool: dict[str, Any], place: str) -> None:
    if tool.get("type") != "function":
        raise invalid("tools", f"{place}.type: must be 'function'")
    function = tool.get("function")
    if not isinstance(function, dict):
        raise invalid("tools", f"{place}.function: must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not 1 <= len(name) <= MAX_NAME_CHARS:
        raise invalid(
            "tools", f"{place}.function.name: must be a string of 1 to {MAX_NAME_CHARS} characters"
        )
    if any(char in "<>" or char.isspace() for char in name):
        raise invalid("tools", f"{place}.function.name: must not hold spaces, < or >")
    kinds = {"description": str, "parameters": dict, "strict": bool}
    for key, kind in kinds.items():
        value = function.get(key)
        if value is not None and not isinstance(value, kind):
            words = {str: "a string", dict: "an object", bool: "true or false"}
            raise invalid("tools", f"{place}.function.{key}: must be {words[kind]}")


def _read_messages(data: bytes) -> list[dict[str, Any]]:
    elements = decode_field(_messages, data, "messages")
    if not elements:
        raise invalid("messages", "messages: must not be empty")
    if len(elements) > MAX_MESSAGES:
        raise invalid("messages", f"messages: at most {MAX_MESSAGES}, got {len(elements)}")
    return [_for_template(element, f"messages[{i}]") for i, element in enumerate(elements)]


def _for_template(element: Raw, place: str) -> dict[str, Any]:
    message = _decode(_message, element, place)
    if message.role not in ROLES:
        raise _wrong(place + ".role", f"must be one of {', '.join(ROLES)}, got {message.role!r}")
    shown: dict[str, Any] = {"role": message.role, "content": _text(message.content, place)}
    if message.name is not None:
        shown["name"] = message.name
    reasoning = message.reasoning_content or message.reasoning
    calls = message.tool_calls
    if message.role != "assistant" and (reasoning or calls):
        which = "reasoning_content" if reasoning else "tool_calls"
        raise _wrong(f"{place}.{which}", "only an assistant's message may have it")
    if reasoning:
        shown["reasoning_content"] = reasoning
    if calls:
        shown["tool_calls"] = [
            _call(call, f"{place}.tool_calls[{i}]") for i, call in enumerate(calls)
        ]
    if message.tool_call_id is not None:
        if message.role != "tool":
            raise _wrong(f"{place}.tool_call_id", "only a tool's message may have it")
        shown["tool_call_id"] = message.tool_call_id
    return shown


def _text(content: str | list[dict[str, Any]] | None, place: str) -> str:
    """Text parts are joined as they are, which is what the templates do with them."""
    if content is None or isinstance(content, str):
        return content or ""
    texts: list[str] = []
    for index, part in enumerate(content):
        at = f"{place}.content[{index}]"
        kind, text = part.get("type"), part.get("text")
        if kind != "text":
            shown = kind[:40] if isinstance(kind, str) else type(kind).__name__
            raise _wrong(at, f"parts of type {shown!r} are not supported: this model reads text")
        if not isinstance(text, str):
            raise _wrong(at + ".text", "must be a string")
        unknown = part.keys() - {"type", "text", "cache_control"}
        if unknown:
            raise _wrong(at, f"unknown field {min(unknown)[:100]!r}")
        texts.append(text)
    return "".join(texts)


def _call(call: ToolCallOfMessage, place: str) -> dict[str, Any]:
    """Templates go through the arguments by name."""
    if call.type not in (None, "function"):
        raise _wrong(place + ".type", "must be 'function'")
    arguments = call.function.arguments
    if not arguments:
        arguments = {}
    elif isinstance(arguments, str):
        try:
            arguments = _object.decode(arguments)
        except (msgspec.DecodeError, RecursionError):
            raise _wrong(place + ".function.arguments", "must be a JSON object") from None
    function = {"name": call.function.name, "arguments": arguments}
    return {"id": call.id, "type": "function", "function": function}


def _decode(decoder: msgspec.json.Decoder[Message], element: Raw, place: str) -> Message:
    """Errors name the field `messages` as the one at fault, and the place in it."""
    try:
        found: Message = decode_field(decoder, element, place)
    except ApiError as error:
        raise invalid("messages", error.message) from None
    return found


def _wrong(place: str, message: str) -> ApiError:
    return invalid("messages", f"{place}: {message}")
