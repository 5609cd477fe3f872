"""Answers and streams of /v1/completions over real sockets and a ScriptedEngine."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from .scripted_engine import ROW_ERROR, output_id
from .server_process import ServerProcess, start_scripted, wait_until

PROMPT = [50, 60]


def text_of(prompt_ids: list[int], num_tokens: int) -> str:
    return "".join(chr(output_id(prompt_ids, n)) for n in range(num_tokens))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    started = start_scripted(tmp_path_factory.mktemp("http"), max_queue=8)
    yield started.wait_ready()
    started.stop()


def events(response: httpx.Response) -> list[Any]:
    """The data of each event; [DONE] must be the last and is left out."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


def test_a_completion(server: ServerProcess) -> None:
    response = server.complete(model="scripted", prompt=PROMPT, max_tokens=4)
    assert response.status_code == 200
    body = response.json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 0
    assert body == {
        "object": "text_completion",
        "model": "scripted",
        "choices": [
            {
                "index": 0,
                "text": text_of(PROMPT, 4),
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {"prompt_tokens": 2, "completion_tokens": 4, "total_tokens": 6},
    }


def test_a_text_prompt_is_its_tokens(server: ServerProcess) -> None:
    text = server.complete(model="scripted", prompt="ab", max_tokens=3).json()
    tokens = server.complete(model="scripted", prompt=list(b"ab"), max_tokens=3).json()
    assert text["choices"] == tokens["choices"]
    assert text["usage"] == tokens["usage"]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_batched_prompts_keep_their_indices(server: ServerProcess, stream: bool) -> None:
    prompts = [[50], [60], [70], [80], [90], [100]]  # more than run at once
    response = server.complete(model="scripted", prompt=prompts, max_tokens=3, stream=stream)
    texts = dict.fromkeys(range(6), "")
    for body in events(response) if stream else [response.json()]:
        for choice in body["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {n: text_of(prompt, 3) for n, prompt in enumerate(prompts)}
    if not stream:
        assert response.json()["usage"]["total_tokens"] == 6 + 18


def test_a_stream_has_the_same_text_and_one_end(server: ServerProcess) -> None:
    chunks = events(server.complete(model="scripted", prompt=PROMPT, max_tokens=20, stream=True))
    assert len(chunks) > 1
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text_of(PROMPT, 20)
    reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert (reasons[-1], set(reasons[:-1])) == ("length", {None})
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert not any("usage" in chunk for chunk in chunks)


def test_usage_comes_last_in_a_stream_that_asks_for_it(server: ServerProcess) -> None:
    chunks = events(
        server.complete(
            model="scripted",
            prompt=PROMPT,
            max_tokens=5,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {
        "prompt_tokens": 2,
        "completion_tokens": 5,
        "total_tokens": 7,
    }


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_stop_string_ends_the_text_before_it_and_the_request(
    server: ServerProcess, stream: bool
) -> None:
    full = text_of(PROMPT, 12)
    before = server.metrics()["vllm:request_success_total:stop"]
    fields = {"prompt": PROMPT, "max_tokens": 400, "stop": full[7:9], "stream": stream}
    response = server.complete(model="scripted", **fields)
    bodies = events(response) if stream else [response.json()]
    choices = [choice for body in bodies for choice in body["choices"]]
    assert "".join(choice["text"] for choice in choices) == full[:7]
    assert (choices[-1]["finish_reason"], choices[-1]["stop_reason"]) == ("stop", full[7:9])
    if not stream:
        assert bodies[0]["usage"]["completion_tokens"] == 9
    wait_until("freed", server.is_idle)
    assert server.metrics()["vllm:request_success_total:stop"] == before + 1


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_logprobs(server: ServerProcess, stream: bool) -> None:
    response = server.complete(
        model="scripted", prompt=PROMPT, max_tokens=3, logprobs=2, stream=stream
    )
    bodies = events(response) if stream else [response.json()]
    parts = [c["logprobs"] for body in bodies for c in body["choices"] if c["logprobs"]]
    joined = {name: [item for part in parts for item in part[name]] for name in parts[0]}
    tokens = list(text_of(PROMPT, 3))
    assert joined == {
        "tokens": tokens,
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"\x01": -0.1, "\x02": -0.2, token: -0.5} for token in tokens],
        "text_offset": [0, 1, 2],
    }


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_failed_row_is_an_error_never_a_silent_end(server: ServerProcess, stream: bool) -> None:
    response = server.complete(model="scripted", prompt=[ROW_ERROR], stream=stream)
    if stream:
        (body,) = events(response)
    else:
        assert response.status_code == 500
        body = response.json()
    assert body["error"]["message"] == "the request failed: logits are not finite"
    assert body["error"]["type"] == "internal_server_error"


def test_two_requests_may_carry_the_same_id(server: ServerProcess) -> None:
    fields = {"model": "scripted", "prompt": PROMPT, "max_tokens": 50, "stream": True}
    headers = {"X-Request-Id": "same"}
    with (
        server.client.stream("POST", "/v1/completions", json=fields, headers=headers) as one,
        server.client.stream("POST", "/v1/completions", json=fields, headers=headers) as two,
    ):
        for response in (one, two):
            response.read()
            text = "".join(chunk["choices"][0]["text"] for chunk in events(response))
            assert text == text_of(PROMPT, 50)


def test_each_chunk_is_one_segment_on_the_wire(server: ServerProcess) -> None:
    """Chunked framing: every HTTP chunk is exactly one event (the last may be the end alone)."""
    body = json.dumps({"model": "scripted", "prompt": PROMPT, "max_tokens": 5, "stream": True})
    request = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Connection: close\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(request.encode())
        raw = b"".join(iter(lambda: connection.recv(65536), b""))
    head, _, rest = raw.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in head.lower()
    chunks = []
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        chunks.append(rest[: int(size, 16)])
        rest = rest[int(size, 16) + 2 :]
    assert chunks.pop() == b""
    assert chunks[-1] == b"data: [DONE]\n\n"
    for chunk in chunks:
        assert chunk.startswith(b"data: ") and chunk.endswith(b"\n\n")
        assert chunk.count(b"\n\n") == 1


def test_openai_client(server: ServerProcess) -> None:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        assert [model.id for model in client.models.list()] == ["scripted", "org/alias"]
        whole = client.completions.create(model="scripted", prompt=PROMPT, max_tokens=9)
        assert whole.choices[0].text == text_of(PROMPT, 9)
        assert whole.usage is not None and whole.usage.completion_tokens == 9
        stream = client.completions.create(
            model="scripted", prompt=PROMPT, max_tokens=9, stream=True
        )
        assert "".join(chunk.choices[0].text for chunk in stream) == text_of(PROMPT, 9)
        with pytest.raises(openai.NotFoundError):
            client.completions.create(model="gpt", prompt="a")
        with pytest.raises(openai.BadRequestError, match="unknown field 'foo'"):
            client.completions.create(model="scripted", prompt="a", extra_body={"foo": 1})
        failing = client.completions.create(model="scripted", prompt=[ROW_ERROR], stream=True)
        with pytest.raises(openai.APIError, match="not finite"):
            list(failing)


async def test_openai_async_client(server: ServerProcess) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none") as client:
        stream = await client.completions.create(
            model="scripted", prompt="b", max_tokens=9, stream=True
        )
        texts = [chunk.choices[0].text async for chunk in stream]
    assert "".join(texts) == text_of(list(b"b"), 9)
