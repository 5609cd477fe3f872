"""/tokenize, /detokenize and /tokenizer_info in vLLM's shapes, over real sockets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from deltaserve.engine.tokenizer import Tokenizer
from deltaserve.server.tokenize import read_tokenizer_info, tokenizer_schemas

from .server_process import ServerProcess, start_scripted
from .tiny_checkpoint import IM_END_ID

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}{% endfor %}"
    "{% if tools %}[{{ tools[0].function.name }}]{% endif %}"
    "{% if add_generation_prompt %}{{ eos_token }}"
    "{{ 'no ' if not enable_thinking }}think{% endif %}"
)
HELLO = [{"role": "user", "content": "the "}]
CONFIG = {
    "tokenizer_class": "Qwen2TokenizerFast",
    "eos_token": {"content": "<|im_end|>", "lstrip": False},
    "pad_token": "<|endoftext|>",
    "bos_token": None,
}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenize")
    (path / "tokenizer_config.json").write_text(json.dumps(CONFIG))
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[ServerProcess]:
    started = start_scripted(directory)
    yield started.wait_ready()
    started.stop()


def post(server: ServerProcess, path: str, **fields: Any) -> httpx.Response:
    return server.client.post(path, json=fields)


def test_tokenize(server: ServerProcess, directory: Path) -> None:
    text = " the s\u2603<|im_end|>"
    ids = Tokenizer(directory).encode(text)
    expected = {"count": len(ids), "max_model_len": 512, "tokens": ids, "token_strs": None}
    assert ids[-1] == IM_END_ID
    assert post(server, "/tokenize", prompt=text).json() == expected
    body = post(
        server,
        "/tokenize",
        model="scripted",
        prompt=text,
        add_special_tokens=False,
        return_token_strs=True,
    ).json()
    assert body == expected | {
        "token_strs": ["\u0120the", "\u0120s", "\u00e2", "\u013a", "\u0125", "<|im_end|>"]
    }


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "user:the <|im_end|>no think"),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "user:the <|im_end|>think"),
        ({"add_generation_prompt": False}, "user:the "),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            "user:the [f]<|im_end|>no think",
        ),
    ],
)
def test_tokenize_messages(server: ServerProcess, fields: dict[str, Any], text: str) -> None:
    body = post(server, "/tokenize", messages=HELLO, **fields).json()
    assert post(server, "/detokenize", tokens=body["tokens"]).json() == {"prompt": text}
    assert body["count"] == len(body["tokens"])


def test_tokenize_a_message_to_continue(server: ServerProcess) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "in "}]
    body = post(server, "/tokenize", messages=messages, continue_final_message=True).json()
    shown = post(server, "/detokenize", tokens=body["tokens"]).json()
    assert shown == {"prompt": "user:the assistant:in "}


def test_the_empty_text_has_no_tokens(server: ServerProcess) -> None:
    assert post(server, "/tokenize", prompt="").json()["tokens"] == []
    assert post(server, "/detokenize", tokens=[]).json() == {"prompt": ""}


def test_a_text_longer_than_the_context_is_tokenised(server: ServerProcess) -> None:
    text = "more and more " * 1000
    body = post(server, "/tokenize", prompt=text).json()
    assert body["count"] > 512
    assert post(server, "/detokenize", tokens=body["tokens"]).json() == {"prompt": text}


def test_detokenize_shows_special_tokens(server: ServerProcess) -> None:
    body = post(server, "/detokenize", tokens=[*"\u2603".encode(), 65, 0xE2])
    assert body.json() == {"prompt": "\u2603A\ufffd"}


REFUSALS = [
    ("/tokenize", {}, 400, "prompt", "prompt: is required"),
    ("/tokenize", {"prompt": 5}, 400, "prompt", "prompt: must be a string, got int"),
    ("/tokenize", {"prompt": ["a"]}, 400, "prompt", "prompt: must be a string, got array"),
    ("/tokenize", {"messages": []}, 400, "messages", "messages: must not be empty"),
    ("/tokenize", {"messages": HELLO, "prompt": "a"}, 400, "prompt", "not together with messages"),
    ("/tokenize", {"prompt": "a", "tools": []}, 400, "tools", "tools: needs messages"),
    (
        "/tokenize",
        {"messages": HELLO, "chat_template_kwargs": {"mood": 1}},
        400,
        "chat_template_kwargs",
        "the chat template has no such one",
    ),
    ("/tokenize", {"prompt": "a", "x": 1}, 400, "x", "unknown field 'x'"),
    ("/tokenize", {"prompt": "a", "model": "b"}, 404, "model", "the model 'b' does not exist"),
    ("/detokenize", {}, 400, "tokens", "tokens: is required"),
    ("/detokenize", {"tokens": "a"}, 400, "tokens", "token ids must be integers in a list"),
    ("/detokenize", {"tokens": [271]}, 400, "tokens", "token id 271 is not in 0 .. 270"),
    ("/detokenize", {"tokens": [0] * (1 << 20), "model": "x"}, 413, None, "larger than"),
]


@pytest.mark.parametrize(("path", "fields", "status", "param", "message"), REFUSALS)
def test_refusals(
    server: ServerProcess, path: str, fields: Any, status: int, param: str | None, message: str
) -> None:
    response = post(server, path, **fields)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param
    assert message in response.json()["error"]["message"]


def test_the_schema_has_the_fields_that_are_read(server: ServerProcess) -> None:
    schemas = tokenizer_schemas()
    for path, name, fields in (
        ("/tokenize", "TokenizeBody", {"prompt": "a"}),
        ("/detokenize", "DetokenizeBody", {"tokens": [1]}),
    ):
        assert schemas[name]["additionalProperties"] is False
        everything = dict.fromkeys(schemas[name]["properties"]) | fields
        answer = post(server, path, **everything)
        assert answer.status_code == 200
        shown = schemas["Tokenized" if path == "/tokenize" else "Detokenized"]
        assert set(answer.json()) == set(shown["properties"]) == set(shown["required"])


def test_tokenizer_info(server: ServerProcess) -> None:
    assert server.client.get("/tokenizer_info").json() == {
        "tokenizer_class": "Qwen2TokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "chat_template": TEMPLATE,
    }


def test_tokenizer_info_without_files(tmp_path: Path) -> None:
    assert read_tokenizer_info(tmp_path) == {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text("[")
    assert read_tokenizer_info(tmp_path) == {"tokenizer_class": "PreTrainedTokenizerFast"}
