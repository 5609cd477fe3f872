"""POST /tokenize and /detokenize, GET /tokenizer_info: the tokenizer over HTTP, in vLLM's shapes.

With them an evaluation harness needs no tokenizer of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Raw
from starlette.requests import Request
from starlette.responses import Response

from .admission import require_model, require_ready
from .chat_messages import MESSAGES_SCHEMA, TOOLS_SCHEMA, read_messages, read_tools
from .chat_prompt import render_chat, require_template
from .errors import JsonResponse
from .json_body import BodyParser, invalid
from .prompts import NORMALISED, encode_until, read_ids, read_text
from .request_body import read_json_body
from .state import ServerState
from .streaming import until_disconnect

MAX_IDS = 1 << 20
"""A text may have more tokens than the context, and so many more."""


class TokenizeBody(msgspec.Struct, kw_only=True):
    """`prompt` or `messages`; what follows `messages` belongs to it, as in a chat request.
    `add_special_tokens`: of a prompt they are added by default, a chat's template writes its own.
    """

    model: str | None = None
    prompt: Raw | None = None
    messages: Raw | None = None
    tools: Raw | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class Tokenized(msgspec.Struct):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: Raw
    model: str | None = None


class Detokenized(msgspec.Struct):
    prompt: str


_OF_CHAT = ("tools", "chat_template_kwargs", "add_generation_prompt", "continue_final_message")

_tokenize_parser = BodyParser(TokenizeBody)
_detokenize_parser = BodyParser(DetokenizeBody)


def tokenizer_schemas(ref_template: str = "#/components/schemas/{name}") -> dict[str, Any]:
    """JSON schemas by name: TokenizeBody, Tokenized, DetokenizeBody, Detokenized."""
    _, schemas = msgspec.json.schema_components(
        (TokenizeBody, Tokenized, DetokenizeBody, Detokenized), ref_template=ref_template
    )
    ids = {"type": "array", "items": {"type": "integer", "minimum": 0}, "maxItems": MAX_IDS}
    schemas["TokenizeBody"]["properties"] |= {
        "prompt": {"type": ["string", "null"]},
        "messages": {"anyOf": [MESSAGES_SCHEMA, {"type": "null"}]},
        "tools": TOOLS_SCHEMA,
    }
    of_chat = {name: {"type": "null"} for name in _OF_CHAT}
    schemas["TokenizeBody"]["oneOf"] = [
        {"required": ["prompt"], "properties": {"messages": {"type": "null"}, **of_chat}},
        {
            "required": ["messages"],
            "properties": {"prompt": {"type": "null"}, "messages": {"type": "array"}},
        },
    ]
    schemas["DetokenizeBody"]["properties"]["tokens"] = ids
    for name in ("TokenizeBody", "DetokenizeBody"):
        schemas[name]["additionalProperties"] = False
    return schemas


async def tokenize(request: Request) -> Response:
    """A text longer than the context is counted all the same."""
    state = _ready(request)
    fields = _tokenize_parser.parse(await read_json_body(request, state.max_body_bytes))
    if fields.model is not None:
        require_model(state, fields.model)
    return await until_disconnect(request.receive, _tokenize(state, fields))


async def detokenize(request: Request) -> Response:
    state = _ready(request)
    fields = _detokenize_parser.parse(await read_json_body(request, state.max_body_bytes))
    if fields.model is not None:
        require_model(state, fields.model)
    return await until_disconnect(request.receive, _detokenize(state, fields))


async def tokenizer_info(request: Request) -> Response:
    """tokenizer_config.json with special tokens as plain text, and the chat template."""
    state = _ready(request)
    assert state.tokenizer is not None
    info = await asyncio.to_thread(read_tokenizer_info, state.tokenizer.directory)
    if state.chat_template is not None:
        info["chat_template"] = state.chat_template.source
    return JsonResponse(info)


def read_tokenizer_info(directory: Path) -> dict[str, Any]:
    """Missing or unreadable files say nothing; `tokenizer_class` is always there."""
    info: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    with contextlib.suppress(OSError, ValueError, TypeError):
        info |= json.loads((directory / "tokenizer_config.json").read_bytes())
    for name, value in info.items():
        if name.endswith("_token") and isinstance(value, dict):
            info[name] = value.get("content")
    return info


def _ready(request: Request) -> ServerState:
    state: ServerState = request.app.state.server
    require_ready(state)
    return state


async def _tokenize(state: ServerState, fields: TokenizeBody) -> Response:
    facts, tokenizer = state.engine.facts, state.tokenizer
    assert facts is not None and tokenizer is not None
    max_model_len = facts.capacity.max_model_len
    limit = max(max_model_len, MAX_IDS)
    name = "prompt" if fields.messages is None else "messages"
    text = await _text(state, fields, limit)
    ids, end = await encode_until(tokenizer, text, limit)
    if end < len(text):
        raise invalid(name, f"{name}: more than {limit} tokens")
    if fields.add_special_tokens or (fields.add_special_tokens is None and name == "prompt"):
        before, after = tokenizer.affixes()
        ids = [*before, *ids, *after]
    strings = None
    if fields.return_token_strs:
        strings = await asyncio.to_thread(lambda: [*map(tokenizer.vocabulary_entry, ids)])
    return JsonResponse(Tokenized(len(ids), max_model_len, ids, strings))


async def _text(state: ServerState, fields: TokenizeBody, max_tokens: int) -> str:
    if fields.messages is None:
        for name in _OF_CHAT:
            if getattr(fields, name) is not None:
                raise invalid(name, f"{name}: needs messages")
        if fields.prompt is None:
            raise invalid("prompt", "prompt: is required, or messages")
        return read_text(fields.prompt)
    if fields.prompt is not None:
        raise invalid("prompt", "prompt: not together with messages")
    assert state.tokenizer is not None
    return await render_chat(
        require_template(state),
        await read_messages(fields.messages),
        read_tools(fields.tools),
        fields.chat_template_kwargs,
        add_generation_prompt=fields.add_generation_prompt,
        continue_final_message=fields.continue_final_message,
        max_chars=NORMALISED * max_tokens * state.tokenizer.max_token_bytes,
    )


async def _detokenize(state: ServerState, fields: DetokenizeBody) -> Response:
    facts, tokenizer = state.engine.facts, state.tokenizer
    assert facts is not None and tokenizer is not None
    limit = max(facts.capacity.max_model_len, MAX_IDS)
    ids = await read_ids(fields.tokens, "tokens", limit, tokenizer.vocab_limit)
    text = await asyncio.to_thread(tokenizer.decode, ids, skip_special_tokens=False)
    return JsonResponse(Detokenized(text))
