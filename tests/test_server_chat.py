"""/v1/chat/completions over real sockets: a model that says what it is told, thinks and calls."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from .chat_server import (
    ARGUMENTS,
    CALL,
    WEATHER,
    chat,
    choices,
    events,
    joined,
    start_reciting,
    without_ids,
)
from .chat_transcripts import SCHEMA, transcript
from .server_process import ServerProcess

TOOLS = [WEATHER]
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
CALLS = [{"type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    started = start_reciting(tmp_path_factory.mktemp("chat"), 3, max_queue=64)
    yield started.wait_ready()
    started.stop()


def message(server: ServerProcess, messages: Any, **fields: Any) -> dict[str, Any]:
    """Of the one choice, which is the same as a stream."""
    whole = without_ids(choices(server, messages, **fields))
    stream = events(chat(server, messages, stream=True, **fields))
    assert without_ids(joined(stream)) == whole
    found: dict[str, Any] = whole[0]["message"] | {"finish_reason": whole[0]["finish_reason"]}
    assert found.pop("role") == "assistant"
    return found


def test_an_answer(server: ServerProcess) -> None:
    body = chat(server, "Hello \u2603", **OFF).json()
    assert body.pop("id").startswith("chatcmpl-")
    assert body.pop("created") > 0
    usage = body.pop("usage")
    assert usage["completion_tokens"] == len(b"Hello \xe2\x98\x83") - 1 + 1  # merged "ll", the end
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "Hello \u2603"},
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": 270,
    }
    assert body == {"object": "chat.completion", "model": "scripted", "choices": [choice]}


def test_a_stream_begins_with_the_role_and_ends_with_the_reason(server: ServerProcess) -> None:
    chunks = events(chat(server, "Hi", stream=True, stream_options={"include_usage": True}, **OFF))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-2]["choices"][0]["finish_reason"] == "stop"
    assert [chunk["usage"] is None for chunk in chunks] == [True] * (len(chunks) - 1) + [False]
    assert chunks[-1]["choices"] == []


THINKING = [
    # said, whether tools are given, the message
    ("why\n</think>\n\nbecause", False, {"reasoning": "why", "content": "because"}),
    ("why", False, {"reasoning": "why", "content": None}),
    (f"why\n{CALL}", True, {"reasoning": "why", "content": None, "tool_calls": CALLS}),
    (f"</think>{CALL}\n{CALL}", True, {"content": None, "tool_calls": CALLS * 2}),
    (f"w</think>a {CALL} b", True, {"reasoning": "w", "content": "a b", "tool_calls": CALLS}),
    (f"w</think>{CALL}", False, {"reasoning": "w", "content": CALL}),
]


@pytest.mark.parametrize(("said", "tools", "expected"), THINKING)
def test_reasoning_and_calls(
    server: ServerProcess, said: str, tools: bool, expected: dict[str, Any]
) -> None:
    found = message(server, said, **({"tools": TOOLS} if tools else {}))
    reason = "tool_calls" if "tool_calls" in expected else "stop"
    if "reasoning" in expected:
        expected = {**expected, "reasoning_content": expected["reasoning"]}
    assert found == expected | {"finish_reason": reason}


@pytest.mark.parametrize("fields", [OFF, {"reasoning_effort": "none"}], ids=["kwargs", "effort"])
def test_with_thinking_off_all_is_content(server: ServerProcess, fields: dict[str, Any]) -> None:
    said = "why\n</think>\n\nbecause"
    assert message(server, said, **fields) == {"content": said, "finish_reason": "stop"}


REASONING = [
    # said, whether tools are given, that of it which is reasoning
    ("so\n</think>\n\nbecause", {}, "so\n"),
    ("<think>\nhello \u2603\n</think>b", {}, "<think>\nhello \u2603\n"),
    ("a </thin </think> b", {}, "a </thin "),
    ("</think>b", {}, ""),
    ("why </thi", {}, "why </thi"),
    (f"why\n{CALL}", {"tools": TOOLS}, "why\n"),
    (f"why\n{CALL}</think>b", {"tools": TOOLS}, "why\n"),
    (f"why\n{CALL}", {}, f"why\n{CALL}"),
    ("why\n</think>b", OFF, ""),
]


@pytest.mark.parametrize(("said", "fields", "reasoning"), REASONING, ids=lambda value: None)
def test_usage_counts_the_tokens_of_the_reasoning(
    server: ServerProcess, said: str, fields: dict[str, Any], reasoning: str
) -> None:
    body = chat(server, said, logprobs=True, n=2, **fields).json()
    starts, end = [0], len(reasoning.encode())
    for entry in body["choices"][0]["logprobs"]["content"]:
        starts.append(starts[-1] + len(entry["bytes"]))
    num_tokens = 2 * sum(start < end for start in starts[:-1])
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": num_tokens}

    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(chat(server, said, stream=True, stream_options=options, n=2, **fields))
    assert chunks[-1]["usage"] == body["usage"]
    details = [chunk["usage"]["completion_tokens_details"] for chunk in chunks]
    counts = [detail["reasoning_tokens"] for detail in details]
    assert counts == sorted(counts) and counts[0] == 0


def test_all_tokens_are_reasoning_where_it_is_cut(server: ServerProcess) -> None:
    usage = chat(server, "what is it </think>b", max_tokens=5).json()["usage"]
    assert usage["completion_tokens"] == 5
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 5}


def test_transcripts_are_the_same_whole_and_streamed(server: ServerProcess) -> None:
    functions = [{"name": name, "parameters": SCHEMA} for name in ("f", "get_weather")]
    tools = [{"type": "function", "function": function} for function in functions]
    for seed in range(0, 200, 4):
        case = transcript(random.Random(seed))
        if not case.text.strip():
            continue
        thinking = {"enable_thinking": case.reasoning}
        found = message(server, case.text, tools=tools, chat_template_kwargs=thinking)
        assert found.get("reasoning", "") == case.message.reasoning
        assert (found["content"] or "") == case.message.content
        assert len(found.get("tool_calls", ())) == len(case.values)


@pytest.mark.parametrize("cut", range(1, 120, 17))
def test_an_output_that_is_cut(server: ServerProcess, cut: int) -> None:
    """Whatever of a call is there, no tag of it is shown, and the reason is `length`."""
    found = message(server, f"why</think>\n{CALL}", tools=TOOLS, max_tokens=cut)
    assert found["finish_reason"] == "length"
    assert "<tool_call>" not in str(found)
    calls = found.get("tool_calls", [])
    assert all(ARGUMENTS.startswith(call["function"]["arguments"]) for call in calls)


def test_tools_are_shown_to_the_model_unless_none_may_be_called(server: ServerProcess) -> None:
    def prompt(**fields: Any) -> str:
        ids = chat(server, CALL, return_token_ids=True, **OFF, **fields).json()["prompt_token_ids"]
        text = server.client.post("/detokenize", json={"tokens": ids}).json()["prompt"]
        return str(text).removeprefix(CALL)

    shown = prompt(tools=TOOLS)
    assert '{"type": "function", "function": {"name": "get_weather", "description": ' in shown
    assert prompt(tools=TOOLS, tool_choice="auto") == shown
    assert prompt(tools=TOOLS, tool_choice="none") == prompt() != shown
    found = message(server, CALL, tools=TOOLS, tool_choice="none", **OFF)
    assert found == {"content": CALL, "finish_reason": "stop"}


def test_one_call_at_most_without_parallel_tool_calls(server: ServerProcess) -> None:
    said = f"{CALL}\n{CALL}"
    found = message(server, said, tools=TOOLS, parallel_tool_calls=False, **OFF)
    assert found["tool_calls"] == CALLS
    assert message(server, said, tools=TOOLS, **OFF)["tool_calls"] == CALLS * 2


def test_n_choices(server: ServerProcess) -> None:
    found = choices(server, f"a</think>b{CALL}", tools=TOOLS, n=3)
    assert [choice["index"] for choice in found] == [0, 1, 2]
    assert {choice["message"]["content"] for choice in found} == {"b"}
    stream = events(chat(server, f"a</think>b{CALL}", tools=TOOLS, n=3, stream=True))
    assert without_ids(joined(stream)) == without_ids(found)


def test_logprobs_are_of_all_tokens(server: ServerProcess) -> None:
    found = message_choice(server, "a</think>b", logprobs=True, top_logprobs=2)
    entries = found["logprobs"]["content"]
    assert "".join(entry["token"] for entry in entries) == "a</think>b<|im_end|>"
    assert entries[0] == {
        "token": "a",
        "logprob": -0.5,
        "bytes": [97],
        "top_logprobs": [
            {"token": "A", "logprob": -0.1, "bytes": [65]},
            {"token": "bytes:\\xe2", "logprob": -0.2, "bytes": [0xE2]},
        ],
    }
    bare = message_choice(server, "b", logprobs=True)["logprobs"]["content"]
    assert {len(entry["top_logprobs"]) for entry in bare} == {2}  # as the engine gave them


def message_choice(server: ServerProcess, said: str, **fields: Any) -> dict[str, Any]:
    (whole,) = choices(server, said, **fields)
    (streamed,) = joined(events(chat(server, said, stream=True, **fields)))
    assert streamed == whole
    return whole


def test_token_ids(server: ServerProcess) -> None:
    body = chat(server, "abc", return_token_ids=True).json()
    assert body["choices"][0]["token_ids"] == [*b"abc", 270]
    assert body["prompt_token_ids"][:3] == [*b"abc"]
    chunks = events(chat(server, "abc", return_token_ids=True, stream=True))
    assert joined(chunks)[0]["token_ids"] == [*b"abc", 270]
    assert [chunk.get("prompt_token_ids") for chunk in chunks] == [
        body["prompt_token_ids"],
        *[None] * (len(chunks) - 1),
    ]


def test_a_stop_string_ends_the_message(server: ServerProcess) -> None:
    found = message(server, "why</think>one two three", stop=" tw")
    assert (found["reasoning"], found["content"], found["finish_reason"]) == ("why", "one", "stop")


def test_the_default_length_is_what_fits(server: ServerProcess) -> None:
    said = "x" * 1300
    assert message(server, said, **OFF)["finish_reason"] == "stop"
    for name in ("max_tokens", "max_completion_tokens"):
        found = message(server, said, **{name: 7}, **OFF)
        assert found == {"content": "x" * 7, "finish_reason": "length"}
    response = chat(server, "x" * 4100)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"


def test_a_final_message_is_continued(server: ServerProcess) -> None:
    def prompt(**fields: Any) -> str:
        messages = [
            {"role": "user", "content": "Name it"},
            {"role": "assistant", "content": "It is "},
        ]
        response = chat(server, messages, return_token_ids=True, max_tokens=1, **fields)
        ids = response.json()["prompt_token_ids"]
        return str(server.client.post("/detokenize", json={"tokens": ids}).json()["prompt"])

    assert prompt(continue_final_message=True).endswith("<|im_start|>assistant\nIt is ")
    assert prompt().endswith("It is<|im_end|>\n<|im_start|>assistant\n<think>\n")
    assert prompt(add_generation_prompt=False).endswith("It is<|im_end|>\n")


def test_earlier_turns_reach_the_template(server: ServerProcess) -> None:
    call = {"id": "call_1", "type": "function", "index": 0}
    messages = [
        {"role": "developer",
         "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "short"}]},
        {"role": "user", "content": "q", "name": None},
        {"role": "assistant", "content": None, "refusal": None, "annotations": [], "audio": None,
         "function_call": None, "reasoning_content": "r",
         "tool_calls": [call | {"function": {"name": "f", "arguments": '{"a": [1]}'}}]},
        {"role": "tool", "content": "r", "tool_call_id": "call_1"},
        {"role": "user", "content": "z"},
    ]  # fmt: skip
    ids = chat(server, messages, return_token_ids=True).json()["prompt_token_ids"]
    text = server.client.post("/detokenize", json={"tokens": ids}).json()["prompt"]
    assert "<|im_start|>system\nBe short<|im_end|>" in text
    assert "<|im_start|>assistant\n[a=[1]]<|im_end|>" in text


def test_what_asks_for_nothing_is_accepted(server: ServerProcess) -> None:
    neutral = {"modalities": ["text"], "functions": [], "function_call": "none", "tools": []}
    nothing = {"user": "u", "store": True, "metadata": {"a": 1}, "response_format": None}
    found = message(server, "a</think>b", **neutral, **nothing, tool_choice="auto")
    assert found["content"] == "b"


def test_another_model_is_not_there(server: ServerProcess) -> None:
    assert chat(server, "hi", model="gpt").status_code == 404
