"""Chats with the demo model: real text through template, model, router, and grammar."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from .chat_server import chat, choices, events, joined, start_demo, without_ids
from .server_process import ServerProcess

ON = {"chat_template_kwargs": {"enable_thinking": True}}
GET_WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
CAPITAL = {
    "type": "json_schema",
    "json_schema": {
        "name": "capital",
        "schema": {
            "type": "object",
            "properties": {"city": {"enum": ["Oslo", "Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
OSLO = [("get_weather", {"city": "Oslo"})]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    started = start_demo(tmp_path_factory.mktemp("demo"))
    yield started.wait_ready()
    started.stop()


def ask(server: ServerProcess, text: Any, **fields: Any) -> tuple[str | None, Any, list[Any], str]:
    """(reasoning, content, calls, finish_reason), the same whole and streamed."""
    fields = {"model": "demo", "temperature": 0, "max_tokens": 200, **fields}
    (choice,) = whole = without_ids(choices(server, text, **fields))
    assert without_ids(joined(events(chat(server, text, stream=True, **fields)))) == whole
    message = choice["message"]
    calls = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]
    return message.get("reasoning_content"), message["content"], calls, choice["finish_reason"]


def test_thinking_on_and_off(server: ServerProcess) -> None:
    question = "What is 7 + 5?"
    assert ask(server, question) == (None, "7 + 5 = 12", [], "stop")
    thought = "The question is: What is 7 + 5? The answer is 12."
    assert ask(server, question, **ON) == (thought, "7 + 5 = 12", [], "stop")


def test_reasoning_tokens_are_those_before_its_end(server: ServerProcess) -> None:
    end = server.client.post("/tokenize", json={"prompt": "</think>"}).json()["tokens"]
    asked = {"model": "demo", "temperature": 0, "return_token_ids": True, **ON}
    body = chat(server, "What is 7 + 5?", **asked).json()
    num_tokens = body["choices"][0]["token_ids"].index(*end)
    assert 0 < num_tokens == body["usage"]["completion_tokens_details"]["reasoning_tokens"]


def test_a_call_and_its_result(server: ServerProcess) -> None:
    question = "What is the weather in Oslo?"
    assert ask(server, question, tools=[GET_WEATHER]) == (None, None, OSLO, "tool_calls")
    thinking = ask(server, question, tools=[GET_WEATHER], **ON)
    assert thinking == ("I need to call get_weather.", None, OSLO, "tool_calls")
    function = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
    messages = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": function}]},
        {"role": "tool", "tool_call_id": "1", "content": '{"weather": "sunny", "degrees": 21}'},
    ]
    _, content, calls, reason = ask(server, messages, tools=[GET_WEATHER])
    assert content == "It is sunny in Oslo, and the temperature is 21 degrees."
    assert (calls, reason) == ([], "stop")


@pytest.mark.parametrize("thinking", [{}, ON], ids=["plain", "thinking"])
@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "get_weather"}}]
)
def test_a_call_that_must_be_made(
    server: ServerProcess, choice: Any, thinking: dict[str, Any]
) -> None:
    asked = {"tools": [GET_WEATHER], "tool_choice": choice, "parallel_tool_calls": False}
    reasoning, content, calls, reason = ask(server, "What is 7 + 5?", **asked, **thinking)
    assert bool(reasoning) == bool(thinking)
    assert [(name, *arguments) for name, arguments in calls] == [("get_weather", "city")]
    assert (content, reason) == (None, "tool_calls")


@pytest.mark.parametrize(
    ("param", "asked"),
    [
        ("tools", {"tools": [GET_WEATHER], "tool_choice": "required"}),
        ("response_format", {"response_format": CAPITAL}),
        ("response_format", {"tools": [GET_WEATHER], "response_format": CAPITAL}),
    ],
    ids=["call", "content", "either"],
)
def test_a_dead_end_names_the_field_that_led_there(
    server: ServerProcess, param: str, asked: dict[str, Any]
) -> None:
    """Where a grammar is complete before `min_tokens`, neither the end nor more may come."""
    fields = {"model": "demo", "temperature": 0, "max_tokens": 200, "min_tokens": 200, **ON}
    fields |= {**asked, "parallel_tool_calls": False}
    response = chat(server, "What is 7 + 5?", **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: leaves no token that may be sampled")
    *chunks, last = events(chat(server, "What is 7 + 5?", stream=True, **fields))
    assert last == {"error": error}
    assert any("reasoning" in chunk["choices"][0]["delta"] for chunk in chunks)


@pytest.mark.parametrize("thinking", [{}, ON], ids=["plain", "thinking"])
def test_content_by_a_schema(server: ServerProcess, thinking: dict[str, Any]) -> None:
    question = "What is the capital of France?"
    reasoning, content, _, reason = ask(server, question, response_format=CAPITAL, **thinking)
    assert json.loads(content)["city"] in ("Oslo", "Paris", "Rome")
    assert (bool(reasoning), reason) == (bool(thinking), "stop")


def test_a_call_or_content_by_a_schema(server: ServerProcess) -> None:
    asked = {"tools": [GET_WEATHER], "response_format": CAPITAL}
    assert ask(server, "What is the weather in Oslo?", **asked)[2] == OSLO
    asked["tools"] = []
    _, content, calls, _ = ask(server, "What is the capital of France?", **asked)
    assert (set(json.loads(content)), calls) == ({"city"}, [])
