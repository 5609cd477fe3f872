"""What /v1/chat/completions refuses, with the field at fault and a message that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .chat_server import WEATHER, chat, start_reciting
from .server_process import ServerProcess

TOOLS = [WEATHER]
NAMED = {"type": "function", "function": {"name": "get_weather"}}
HELLO = [{"role": "user", "content": "hi"}]


def with_part(**part: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": [{"type": "text", "text": "What is it?"}, part]}]


REFUSALS: list[tuple[Any, dict[str, Any], str, str]] = [
    # messages, fields, param, part of the message
    ([], {}, "messages", "must not be empty"),
    ({}, {}, "messages", "messages: must be a list, got object"),
    (5, {}, "messages", "messages: must be a list, got int"),
    ([{"content": "hi"}], {}, "messages", "messages[0]: object missing required field `role`"),
    ([{"role": "boss"}], {}, "messages", "messages[0].role: must be one of system, "),
    ([{"role": "user", "content": 5}], {}, "messages", "messages[0].content: must be"),
    ([{"role": "user", "mood": 1}], {}, "messages", "messages[0]: object contains unknown field"),
    (with_part(type="image_url", image_url={"url": "x"}), {}, "messages",
     "messages[0].content[1]: parts of type 'image_url' are not supported"),
    (with_part(type="input_audio", input_audio={}), {}, "messages", "'input_audio' are not"),
    (with_part(type="text"), {}, "messages", "messages[0].content[1].text: must be a string"),
    (with_part(type="text", text="a", x=1), {}, "messages", "unknown field 'x'"),
    ([{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}], {}, "messages",
     "messages[0].tool_calls: only an assistant's"),
    ([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}], {},
     "messages", "messages[0].tool_calls[0].function.arguments: must be a JSON object"),
    ([{"role": "user", "tool_call_id": "1"}], {}, "messages", "messages[0].tool_call_id: only a"),
    ("refuse me", {}, "messages", "the chat template refuses the messages: no such chat"),
    (HELLO, {"tools": [{"type": "x"}]}, "tools", "tools[0].type: must be 'function'"),
    (HELLO, {"tools": [{"type": "function"}]}, "tools", "tools[0].function: must be an object"),
    (HELLO, {"tools": [WEATHER, WEATHER]}, "tools", "two have the same name"),
    (HELLO, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools", "spaces"),
    (HELLO, {"tools": [{"type": "function", "function": {"name": "a", "parameters": []}}]},
     "tools", "tools[0].function.parameters: must be an object"),
    (HELLO, {"tool_choice": "required"}, "tool_choice", "there are no tools"),
    (HELLO, {"tool_choice": "some"}, "tool_choice", "tool_choice: must be"),
    (HELLO, {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": TOOLS},
     "tool_choice", "there is no tool 'g'"),
    (HELLO, {"tool_choice": NAMED, "tools": TOOLS, "response_format": {"type": "json_object"}},
     "response_format", "not where tool_choice asks for a call"),
    (HELLO, {"guided_regex": "a", "tools": TOOLS}, "guided_regex", "not where tools may be called"),
    (HELLO, {"max_tokens": 0}, "max_tokens", "must be between 1 and"),
    (HELLO, {"max_completion_tokens": 0}, "max_completion_tokens", "must be between 1 and"),
    (HELLO, {"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens", "must equal"),
    (HELLO, {"max_tokens": 9999}, "messages", "limit 4000"),
    (HELLO, {"top_logprobs": 2}, "top_logprobs", "needs logprobs: true"),
    (HELLO, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
    (HELLO, {"logprobs": 3}, "logprobs", "must be true or false"),
    (HELLO, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "not in a stream"),
    (HELLO, {"n": 129}, "n", "between 1 and 128"),
    (HELLO, {"temperature": -1}, "temperature", "temperature: must be in"),
    (HELLO, {"chat_template_kwargs": {"mood": 1}}, "chat_template_kwargs", "no such one"),
    (HELLO, {"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "field of its own"),
    (HELLO, {"chat_template": "x"}, "chat_template", "not supported by this server"),
    (HELLO, {"functions": [{"name": "f"}]}, "functions", "not supported by this server"),
    (HELLO, {"modalities": ["text", "audio"]}, "modalities", "not supported by this server"),
    (HELLO, {"reasoning_effort": "high"}, "reasoning_effort", "does not know 'high'"),
    (HELLO, {"reasoning_effort": "extreme"}, "reasoning_effort", "must be one of"),
    (HELLO, {"continue_final_message": True}, "continue_final_message", "an assistant's"),
    ([{"role": "assistant", "content": "a"}],
     {"continue_final_message": True, "add_generation_prompt": True},
     "continue_final_message", "not together with add_generation_prompt"),
    (HELLO, {"stream_options": {}}, "stream_options", "only allowed with stream"),
    (HELLO, {"prompt": "a"}, "prompt", "unknown field 'prompt'"),
    (HELLO, {"echo": True}, "echo", "unknown field 'echo'"),
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    started = start_reciting(tmp_path_factory.mktemp("chat"))
    yield started.wait_ready()
    started.stop()


@pytest.mark.parametrize(("messages", "fields", "param", "text"), REFUSALS)
def test_refusals(
    server: ServerProcess, messages: Any, fields: dict[str, Any], param: str, text: str
) -> None:
    response = chat(server, messages, **fields)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param), error
    assert text in error["message"]
