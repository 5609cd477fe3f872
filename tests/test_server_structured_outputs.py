"""Constrained outputs over HTTP, from a model that is a table (`bigram_server`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .bigram_server import answer, complete, start_bigram, stream
from .server_process import ServerProcess

COMPACT = {"whitespace_flexible": False, "whitespace_pattern": None}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    started = start_bigram(tmp_path_factory.mktemp("bigram"))
    yield started
    started.stop()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"guided_choice": ["cz", "bcaz", "bab"]}, "bcaz"),
        ({"guided_regex": "z+b"}, "z" * 10),
        ({"guided_regex": "[bz]{3}"}, "bzz"),
        ({"guided_grammar": 'root ::= "z" [ab]'}, "za"),
        ({"structured_outputs": {"regex": "zzz"}}, "zzz"),
        ({"structured_outputs": {"json": {"enum": [17]}}}, "17"),
        ({"guided_json": {"x-guidance": COMPACT, "const": [1, None]}}, "[1,null]"),
        ({"response_format": {"type": "text"}}, "bcabcabcab"),
    ],
    ids=str,
)
def test_the_likeliest_output_that_follows_the_grammar(
    server: ServerProcess, fields: dict[str, Any], text: str
) -> None:
    """After `a` that is bcabc.. if nothing is asked."""
    given, finish, _ = answer(server, "a", max_tokens=10, **fields)
    assert given == text
    assert finish == ("length" if len(text) == 10 else "stop")


def test_a_stream_and_its_choices(server: ServerProcess) -> None:
    schema = {"type": "array", "items": {"enum": ["z", "a"]}, "minItems": 2, "maxItems": 2}
    events = stream(
        server,
        "a",
        n=3,
        temperature=1.0,
        top_k=0,
        seed=7,
        max_tokens=200,
        structured_outputs={"json": schema, "disable_any_whitespace": True},
    )
    texts = ["", "", ""]
    for event in events:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    for text in texts:
        value = json.loads(text)
        assert len(value) == 2 and set(value) <= {"z", "a"}
        assert " " not in text


def test_bad_words_and_a_grammar_both_hold(server: ServerProcess) -> None:
    text, *_ = answer(server, "a", max_tokens=4, guided_regex="[bcz]{4}", bad_words=["bc"])
    assert text == "bzzz"


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"guided_regex": "("}, "guided_regex", "unclosed group"),
        ({"guided_json": {"uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"guided_json": '{"type": '}, "guided_json", "EOF"),
        ({"guided_grammar": "start: missing"}, "guided_grammar", "missing"),
        ({"guided_choice": []}, "guided_choice", "choices"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"schema": {"$ref": "http://127.0.0.1:1/x"}},
                }
            },
            "response_format",
            "does not fetch",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_cannot_be_done_is_a_400_that_names_the_field(
    server: ServerProcess, fields: dict[str, Any], param: str, message: str
) -> None:
    response = server.complete(model="m", prompt="a", **fields)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]


def test_others_are_served_while_a_grammar_takes_too_long(server: ServerProcess) -> None:
    hostile = {"type": "integer", "multipleOf": 99999989}
    with ThreadPoolExecutor(1) as thread:
        refused = thread.submit(server.complete, model="m", prompt="a", guided_json=hostile)
        complete(server, "a", max_tokens=20)
        complete(server, "a", max_tokens=3, guided_regex="[xyz]{3}")
        assert not refused.done()
        response = refused.result()
    assert response.status_code == 400
    assert "takes too long to compile" in response.json()["error"]["message"]
    complete(server, "a", max_tokens=3, guided_regex="[cz]{3}")  # by the process that was ended
