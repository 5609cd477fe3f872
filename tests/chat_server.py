"""A server over a scripted engine whose model says what the last message tells it to say, or over
the demo model; and what its answers and streams amount to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from .server_process import ROOT, ServerProcess, start_scripted

# What is to be said comes first; the rest is as in Qwen3.5's template, thinking on by default.
TEMPLATE = """\
{%- if messages[0].content == 'refuse me' %}{{ raise_exception('no such chat') }}{% endif -%}
{{- messages[-1].content -}}
{%- if tools %}<|im_start|>{% for tool in tools %}{{ tool | tojson }}{% endfor %}{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content | trim }}
{%- for call in message.tool_calls or [] %}
{%- for name, value in call.function.arguments | items %}[{{ name }}={{ value }}]{% endfor %}
{%- endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
<think>
{% if enable_thinking is defined and not enable_thinking %}
</think>

{% endif -%}
{%- endif -%}
"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = (
    "<tool_call>\n<function=get_weather>\n<parameter=city>\nOslo\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>"
)
ARGUMENTS = '{"city": "Oslo", "days": 3}'


def start_reciting(directory: Path, tokens_per_step: int = 1, **script: Any) -> ServerProcess:
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    return start_scripted(
        directory, recite=tokens_per_step, obedient=False, max_model_len=4000, **script
    )


def start_demo(directory: Path, *arguments: str) -> ServerProcess:
    model = ["--model-path", str(ROOT / "models" / "demo"), "--served-model-name=demo"]
    flags = ["--port=0", "--max-num-seqs=4", "--max-model-len=2048", *arguments]
    return ServerProcess(["deltaserve.server.cli", "serve", *model, *flags], directory)


def chat(server: ServerProcess, messages: Any, **fields: Any) -> httpx.Response:
    """`messages`: a text is the user's."""
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    body = {"model": "scripted", "messages": messages, **fields}
    return server.client.post("/v1/chat/completions", json=body)


def choices(server: ServerProcess, messages: Any, **fields: Any) -> list[dict[str, Any]]:
    response = chat(server, messages, **fields)
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["choices"]
    return found


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices that a stream's deltas add up to, as a whole answer has them."""
    found: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for part in chunk["choices"]:
            index, delta = part["index"], part["delta"]
            if index not in found:
                assert delta == {"role": "assistant", "content": ""}
                message: dict[str, Any] = {"role": "assistant", "content": ""}
                found[index] = {"index": index, "message": message, "logprobs": None}
                found[index] |= {"finish_reason": None, "stop_reason": None}
                continue
            choice = found[index]
            assert choice["finish_reason"] is None
            _add(choice["message"], delta)
            if part["logprobs"] is not None:
                choice["logprobs"] = choice["logprobs"] or {"content": []}
                choice["logprobs"]["content"] += part["logprobs"]["content"]
            if "token_ids" in part:
                choice["token_ids"] = choice.get("token_ids", []) + part["token_ids"]
            choice |= {name: part[name] for name in ("finish_reason", "stop_reason")}
    for choice in found.values():
        message = choice["message"]
        if not message["content"] and message.keys() & {"reasoning", "tool_calls"}:
            message["content"] = None
    return [found[index] for index in sorted(found)]


def _add(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name in ("content", "reasoning", "reasoning_content"):
        if name in delta:
            assert delta[name] != ""
            message[name] = message.get(name, "") + delta[name]
    for call in delta.get("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        if call["index"] == len(calls):
            assert call["type"] == "function"
            calls.append({"id": call["id"], "type": "function", "function": call["function"]})
        else:
            assert call.keys() == {"index", "function"}
            calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]


def without_ids(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Tool calls' ids are random; here they are known to be there, and to be different."""
    ids = [call.pop("id") for c in found for call in c["message"].get("tool_calls", ())]
    assert all(id_.startswith("call_") for id_ in ids)
    assert len(set(ids)) == len(ids)
    return found
