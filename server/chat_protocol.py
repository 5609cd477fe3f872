"""What a chat request and its answers look like on the wire, and what is refused.

Sampling fields are protocol.py's; messages and tools chat_messages.py's.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Raw, UnsetType

from deltaserve.engine.sampling_params import MAX_LOGPROBS

from .chat_messages import MESSAGES_SCHEMA, TOOLS_SCHEMA
from .json_body import BodyParser, invalid
from .protocol import (
    INT32,
    LONG_FIELDS,
    NO_EFFECT,
    REFUSED,
    PromptLogprobs,
    SamplingFields,
    Usage,
    check_fields,
    describe_fields,
    says,
)

# As REFUSED of completions; the rest are fields of OpenAI's and vLLM's that ask for other things
# than text, or for another template than the server's.
CHAT_REFUSED: dict[str, tuple[Any, ...]] = {
    **{name: neutral for name, neutral in REFUSED.items() if name != "suffix"},
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
}
ToolChoice = Literal["auto", "none", "required"] | dict[str, Any]
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh")


class ChatBody(SamplingFields, kw_only=True):
    """The fields of a request to /v1/chat/completions. Null means absent."""

    messages: Raw
    tools: Raw | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tokens: Annotated[int, says(minimum=1, maximum=INT32)] | None = None
    max_completion_tokens: Annotated[int, says(minimum=1, maximum=INT32)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, says(minimum=0, maximum=MAX_LOGPROBS)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Annotated[str, says(enum=[*EFFORTS])] | None = None
    audio: Any = None
    chat_template: Any = None
    documents: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    prediction: Any = None
    web_search_options: Any = None


CHAT_HONOURED = frozenset(ChatBody.__struct_fields__) - NO_EFFECT - frozenset(CHAT_REFUSED)


class FunctionCall(msgspec.Struct):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: str = "function"
    function: FunctionCall


class ChatMessage(msgspec.Struct, kw_only=True):
    """The last three are there where the output has them; the reasoning under both names."""

    role: str = "assistant"
    content: str | None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class FunctionDelta(msgspec.Struct):
    name: str | UnsetType
    arguments: str


class ToolCallDelta(msgspec.Struct):
    """The first of a call has id, type and name; arguments are joined."""

    index: int
    function: FunctionDelta
    id: str | UnsetType = UNSET
    type: str | UnsetType = UNSET


class Delta(msgspec.Struct):
    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Of all tokens of the output, those of reasoning and tool calls too."""

    content: list[TokenLogprob]


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChunkChoice(msgspec.Struct):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct):
    """The last two are there where they were asked for."""

    id: str
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    object: str = "chat.completion"
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ChatChunk(msgspec.Struct):
    """One event of a stream."""

    id: str
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "chat.completion.chunk"
    prompt_token_ids: list[int] | UnsetType = UNSET


_parser = BodyParser(ChatBody, LONG_FIELDS)


def parse_chat(body: bytes) -> ChatBody:
    """Field types, refused fields and what does not go together; messages, tools and parameters are
    read from the result. Raises ApiError 400 that names the field."""
    fields = _parser.parse(body)
    check_fields(fields, CHAT_REFUSED)
    for name in ("max_tokens", "max_completion_tokens"):
        value = getattr(fields, name)
        if value is not None and not 1 <= value <= INT32:
            raise invalid(name, f"{name}: must be between 1 and {INT32}")
    if fields.max_tokens is None:
        fields.max_tokens = fields.max_completion_tokens
    elif fields.max_completion_tokens not in (None, fields.max_tokens):
        raise invalid(
            "max_completion_tokens",
            "max_completion_tokens: must equal max_tokens if both are given",
        )
    top = fields.top_logprobs
    if top is not None and not 0 <= top <= MAX_LOGPROBS:
        raise invalid("top_logprobs", f"top_logprobs: must be between 0 and {MAX_LOGPROBS}")
    if top and not fields.logprobs:
        raise invalid("top_logprobs", "top_logprobs: needs logprobs: true")
    if fields.prompt_logprobs is not None and fields.stream:
        raise invalid("prompt_logprobs", "prompt_logprobs: not in a stream")
    if fields.reasoning_effort not in (None, *EFFORTS):
        raise invalid("reasoning_effort", f"reasoning_effort: must be one of {', '.join(EFFORTS)}")
    return fields


def chosen_tools(fields: ChatBody, names: Collection[str]) -> ToolChoice:
    """What the model may do with the tools of these names; "auto" without any is "none". Raises
    ApiError 400."""
    choice = fields.tool_choice
    if choice is None or choice == "auto":
        return "auto" if names else "none"
    if choice == "none":
        return "none"
    name = _named(choice)
    if choice != "required" and name is None:
        raise invalid(
            "tool_choice",
            'tool_choice: must be "auto", "none", "required" or '
            '{"type": "function", "function": {"name": ...}}',
        )
    if not names or (name is not None and name not in names):
        which = "there are no tools" if not names else f"there is no tool {name!r:.100}"
        raise invalid("tool_choice", f"tool_choice: {which}")
    return "required" if name is None else {"type": "function", "function": {"name": name}}


def _named(choice: Any) -> str | None:
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return None
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else None


_TOOL_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["auto", "none", "required", None]},
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {"name": {"type": "string"}},
                },
            },
        },
    ]
}


def chat_schemas(ref_template: str = "#/components/schemas/{name}") -> dict[str, Any]:
    """JSON schemas by name: ChatBody, ChatCompletion, ChatChunk and what they refer to."""
    _, schemas = msgspec.json.schema_components(
        (ChatBody, ChatCompletion, ChatChunk), ref_template=ref_template
    )
    describe_fields(schemas["ChatBody"], CHAT_REFUSED)
    schemas["ChatBody"]["properties"] |= {
        "messages": MESSAGES_SCHEMA,
        "tools": TOOLS_SCHEMA,
        "tool_choice": _TOOL_CHOICE_SCHEMA,
    }
    return schemas
