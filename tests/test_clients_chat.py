"""The examples of docs/clients.md, as they stand there, against the demo model; and more of what
the same clients can ask for."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from .chat_server import WEATHER, start_demo
from .server_process import ROOT, ServerProcess

pytestmark = pytest.mark.clients

DOCUMENT = (ROOT / "docs" / "clients.md").read_text()
EXAMPLES = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", DOCUMENT, re.DOTALL)
THINKING = {"chat_template_kwargs": {"enable_thinking": True}}
ADD: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
            "required": ["a", "b"],
        },
    },
}


class Capital(BaseModel):
    city: Literal["Oslo", "Paris", "Rome"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    started = start_demo(tmp_path_factory.mktemp("demo"))
    yield started.wait_ready()
    started.stop()


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(content: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    return {"model": "demo", "messages": messages, "temperature": 0, **fields}


@pytest.mark.parametrize(("source", "output"), EXAMPLES, ids=range(len(EXAMPLES)))
def test_an_example_of_the_document(server: ServerProcess, source: str, output: str) -> None:
    assert "http://127.0.0.1:8000" in source
    done = subprocess.run(
        [sys.executable, "-c", source.replace("http://127.0.0.1:8000", server.url)],
        env={**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LANGSMITH_TRACING": "false"},
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == output


def test_every_client_has_examples() -> None:
    sources = "\n".join(source for source, _ in EXAMPLES)
    assert DOCUMENT.count("```python") == len(EXAMPLES) > 5
    for name in ("openai", "langchain_openai", "litellm"):
        assert f"import {name}" in sources or f"from {name} import" in sources


def test_the_streaming_helper_of_openai_collects_calls(client: openai.OpenAI) -> None:
    asked = ask("Add 214 and 381.", tools=[ADD], extra_body=THINKING)
    with client.chat.completions.stream(**asked) as stream:
        done = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion().choices[0]
    assert [(event.name, json.loads(event.arguments)) for event in done] == [
        ("add", {"a": 214, "b": 381})
    ]
    assert final.finish_reason == "tool_calls"
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.message.tool_calls is not None and final.message.tool_calls is not None
    (one,), (two,) = whole.message.tool_calls, final.message.tool_calls
    assert one.function.arguments == two.function.arguments
    assert whole.message.reasoning_content == "I need to call add."


def test_forced_calls(client: openai.OpenAI) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        asked = ask("Hello!", tools=[WEATHER], tool_choice=choice, parallel_tool_calls=False)
        message = client.chat.completions.create(**asked, max_tokens=200).choices[0].message
        assert message.tool_calls is not None
        (call,) = message.tool_calls
        assert call.function.name == "get_weather"
        assert set(json.loads(call.function.arguments)) <= {"city", "days"}


@pytest.mark.parametrize("fields", [{}, {"extra_body": THINKING}], ids=["plain", "thinking"])
def test_response_format_with_and_without_thinking(
    client: openai.OpenAI, fields: dict[str, Any]
) -> None:
    asked = ask("What is the capital of France?", response_format=Capital, **fields)
    message = client.chat.completions.parse(**asked).choices[0].message
    assert isinstance(message.parsed, Capital)
    assert bool(getattr(message, "reasoning_content", None)) == bool(fields)


def test_langchain_structured_output_by_function_calling(server: ServerProcess) -> None:
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(
        model="demo", base_url=server.url + "/v1", api_key="none", temperature=0
    )
    for method in ("function_calling", "json_schema"):
        structured = model.with_structured_output(Capital, method=method)
        assert isinstance(structured.invoke("What is the capital of Norway?"), Capital)


async def test_langchain_streams_calls(server: ServerProcess) -> None:
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(
        model="demo", base_url=server.url + "/v1", api_key="none", temperature=0
    ).bind_tools([ADD])
    total = None
    async for chunk in model.astream("Add 214 and 381."):
        total = chunk if total is None else total + chunk
    assert total is not None
    assert [(c["name"], c["args"]) for c in total.tool_calls] == [("add", {"a": 214, "b": 381})]
    assert total.response_metadata["finish_reason"] == "tool_calls"


async def test_litellm_streams_calls_asynchronously(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    asked = ask("Add 214 and 381.", tools=[ADD], stream=True) | {"model": "hosted_vllm/demo"}
    stream = await litellm.acompletion(**asked, api_base=server.url + "/v1", api_key="none")
    whole = litellm.stream_chunk_builder([chunk async for chunk in stream])
    (call,) = whole.choices[0].message.tool_calls
    assert json.loads(call.function.arguments) == {"a": 214, "b": 381}
    assert whole.choices[0].finish_reason == "tool_calls"
