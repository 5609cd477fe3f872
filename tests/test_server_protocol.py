"""Parsing of completion requests, without sockets: what is honoured, accepted and refused."""

from __future__ import annotations

from typing import Any

import pytest

from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.server.errors import ApiError
from deltaserve.server.protocol import (
    HONOURED,
    NO_EFFECT,
    REFUSED,
    CompletionRequest,
    parse_completion,
    parse_json,
)

# Every field of the HTTP contract for /v1/completions, by name.
_FIELDS = """
model prompt max_tokens min_tokens temperature top_p top_k min_p presence_penalty frequency_penalty
repetition_penalty logit_bias seed stop include_stop_str_in_output stop_token_ids ignore_eos
skip_special_tokens logprobs prompt_logprobs echo n best_of suffix stream stream_options user
metadata store service_tier safety_identifier prompt_cache_key allowed_token_ids bad_words
response_format guided_json guided_regex guided_choice guided_grammar structured_outputs
return_token_ids priority cache_salt
"""
CONTRACT = _FIELDS.split()

# A value of each refused field that asks for something.
ASKING: dict[str, Any] = {
    "allowed_token_ids": [1],
    "bad_words": ["a"],
    "best_of": 2,
    "cache_salt": "a",
    "echo": True,
    "frequency_penalty": 0.1,
    "guided_choice": ["a"],
    "guided_grammar": "a",
    "guided_json": {},
    "guided_regex": "a",
    "include_stop_str_in_output": True,
    "logit_bias": {"1": 1},
    "min_tokens": 1,
    "n": 2,
    "presence_penalty": -0.1,
    "priority": 1,
    "prompt_logprobs": 0,
    "repetition_penalty": 1.1,
    "response_format": {"type": "json_object"},
    "return_token_ids": True,
    "skip_special_tokens": False,
    "stop_token_ids": [1],
    "structured_outputs": {},
    "suffix": "a",
}

NEUTRAL = [(name, value) for name, values in REFUSED.items() for value in values]


def parse(**fields: Any) -> CompletionRequest:
    return parse_completion({"model": "m", "prompt": "p", **fields})


def refusal(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**fields)
    assert caught.value.status == 400
    return caught.value


def test_every_field_of_the_contract_is_in_exactly_one_table() -> None:
    tables = [HONOURED, NO_EFFECT, frozenset(REFUSED)]
    assert {name: sum(name in table for table in tables) for name in CONTRACT} == dict.fromkeys(
        CONTRACT, 1
    )
    assert set(CONTRACT) == frozenset.union(*tables)


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_refused_field_is_named(name: str) -> None:
    error = refusal(**{name: ASKING[name]})
    assert (error.param, error.message) == (name, f"{name}: not supported by this server")


@pytest.mark.parametrize(("name", "value"), NEUTRAL, ids=[name for name, _ in NEUTRAL])
def test_a_refused_field_at_its_neutral_value_is_accepted(name: str, value: Any) -> None:
    assert parse(**{name: value}) == parse()


def test_true_is_not_the_neutral_one() -> None:
    assert refusal(n=True).param == "n"
    assert refusal(echo=0).param == "echo"


@pytest.mark.parametrize("name", sorted(NO_EFFECT))
def test_bookkeeping_fields_have_no_effect(name: str) -> None:
    assert parse(**{name: "x"}) == parse()


@pytest.mark.parametrize("name", sorted(HONOURED - {"model", "prompt"}) + sorted(REFUSED))
def test_null_means_absent(name: str) -> None:
    assert parse(**{name: None}) == parse()


def test_an_unknown_field_is_named() -> None:
    error = refusal(temprature=0.5)
    assert (error.param, error.message) == ("temprature", "unknown field 'temprature'")


def test_defaults() -> None:
    assert parse() == CompletionRequest(
        model="m", prompts=("p",), params=SamplingParams(), stream=False, include_usage=False
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 7),
        ("temperature", 0),
        ("top_p", 0.5),
        ("top_k", -1),
        ("min_p", 0.1),
        ("seed", 2**64 - 1),
        ("logprobs", 20),
        ("ignore_eos", True),
    ],
)
def test_a_sampling_field_reaches_the_parameters(name: str, value: Any) -> None:
    assert parse(**{name: value}).params == SamplingParams(**{name: value})


@pytest.mark.parametrize("stop", ["a", ["a"]])
def test_stop_is_a_string_or_a_list(stop: Any) -> None:
    assert parse(stop=stop).params.stop == ("a",)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ("a",)),
        (["a", "b"], ("a", "b")),
        ([1, 2], ([1, 2],)),
        ([[1], [2, 3]], ([1], [2, 3])),
    ],
    ids=["string", "strings", "ids", "lists"],
)
def test_forms_of_prompts(prompt: Any, prompts: Any) -> None:
    assert parse(prompt=prompt).prompts == prompts


MALFORMED: list[tuple[str, Any, str]] = [
    ("prompt", "", "must not be empty"),
    ("prompt", [], "must not be empty"),
    ("prompt", [""], "must not be empty"),
    ("prompt", [[]], "must not be empty"),
    ("prompt", [[1], []], "must not be empty"),
    ("prompt", 5, "must be a string or a list"),
    ("prompt", {}, "must be a string or a list"),
    ("prompt", [1, "a"], "must be a string, a list of strings"),
    ("prompt", [1.0], "must be a string, a list of strings"),
    ("prompt", [True], "must be a string, a list of strings"),
    ("prompt", [[1, "a"]], "token ids must be integers"),
    ("prompt", [[[1]]], "token ids must be integers"),
    ("prompt", ["a"] * 1025, "at most 1024 prompts, got 1025"),
    ("model", 5, "must be a string"),
    ("max_tokens", 0, "must be between 1 and"),
    ("max_tokens", -1, "must be between 1 and"),
    ("max_tokens", 10**40, "must be between 1 and"),
    ("max_tokens", 1.5, "must be an integer"),
    ("max_tokens", "5", "must be an integer"),
    ("max_tokens", True, "must be an integer"),
    ("temperature", -0.1, "must be in"),
    ("temperature", "hot", "must be a number"),
    ("temperature", 10**400, "must be in"),
    ("min_p", -(10**400), "must be in"),
    ("top_p", 0, "must be in"),
    ("top_p", 1.1, "must be in"),
    ("top_k", -2, "must be between"),
    ("min_p", 2, "must be in"),
    ("seed", 2**64, "must be between"),
    ("seed", 0.5, "must be an integer"),
    ("logprobs", 21, "must be between 0 and 20"),
    ("logprobs", True, "must be an integer"),
    ("stop", [str(n) for n in range(17)], "at most 16"),
    ("stop", [""], "non-empty"),
    ("stop", [1], "must be a string or a list of strings"),
    ("stop", "x" * 1025, "at most 1024 characters"),
    ("stream", 1, "must be true or false"),
    ("ignore_eos", "yes", "must be true or false"),
    ("stream_options", {"include_usage": True}, "only allowed with stream"),
]


@pytest.mark.parametrize(
    ("name", "value", "message"), MALFORMED, ids=[f"{m[0]}-{n}" for n, m in enumerate(MALFORMED)]
)
def test_a_malformed_field_is_named(name: str, value: Any, message: str) -> None:
    error = refusal(**{name: value})
    assert error.param == name
    assert error.message.startswith(f"{name}: ") and message in error.message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (5, "stream_options: must be an object"),
        ({"include_usage": 1}, "stream_options.include_usage: must be true or false"),
        ({"continuous_usage_stats": True}, "stream_options.continuous_usage_stats: not supported"),
        ({"chunk": 1}, "stream_options: unknown field 'chunk'"),
    ],
)
def test_malformed_stream_options(options: Any, message: str) -> None:
    assert refusal(stream=True, stream_options=options).message == message


def test_include_usage() -> None:
    assert parse(stream=True, stream_options={"include_usage": True}).include_usage
    assert not parse(stream=True, stream_options={"continuous_usage_stats": False}).include_usage


@pytest.mark.parametrize("name", ["model", "prompt"])
def test_required_fields(name: str) -> None:
    body = {"model": "m", "prompt": "p"} | {name: None}
    with pytest.raises(ApiError, match=f"{name}: is required"):
        parse_completion(body)


BAD_JSON: list[tuple[str, bytes, str]] = [
    ("empty", b"", "not valid JSON"),
    ("cut", b'{"a":', "not valid JSON"),
    ("trailing", b"{} x", "trailing characters"),
    ("array", b"[]", "must be a JSON object"),
    ("number", b"5", "must be a JSON object"),
    ("nan", b'{"temperature":NaN}', "NaN and Infinity are not numbers"),
    ("infinity", b'{"temperature": -Infinity}', "NaN and Infinity are not numbers"),
    ("overflow", b'{"temperature":1e999}', "out of range"),
    ("digits", b'{"seed":' + b"9" * 5000 + b"}", "out of range"),
    ("deep", b'{"a":' + b"[" * 100_000, "nested too deeply"),
    ("lone surrogate", b'{"prompt":"\\ud83d"}', "lone surrogate"),
    ("lone surrogate, more", b'{"prompt":"\\ud83d and more"}', "lone surrogate"),
    ("low surrogate", b'{"prompt":"\\udc00 and more"}', "lone surrogate"),
    ("utf-8", b'{"prompt":"\xff"}', "not valid JSON"),
    ("utf-8 surrogate", b'{"prompt":"\xed\xa0\x80"}', "not valid JSON"),
    ("single quotes", b"{'a':1}", "not valid JSON"),
    ("bom", b"\xef\xbb\xbf{}", "not valid JSON"),
]


@pytest.mark.parametrize(
    ("body", "message"), [case[1:] for case in BAD_JSON], ids=[case[0] for case in BAD_JSON]
)
def test_bad_json_is_refused_with_a_reason(body: bytes, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse_json(body)
    assert caught.value.status == 400
    assert message in caught.value.message


def test_a_surrogate_pair_is_a_character() -> None:
    assert parse_json(b'{"prompt":"\\ud83d\\ude00"}') == {"prompt": "\U0001f600"}
