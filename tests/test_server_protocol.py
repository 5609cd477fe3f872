"""Bodies of completion requests, without sockets: fields, refusals, JSON, the published schema."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deltaserve.server.errors import ApiError
from deltaserve.server.protocol import (
    HONOURED,
    NO_EFFECT,
    REFUSED,
    CompletionBody,
    completion_schemas,
    num_choices,
    parse_completion,
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
    "suffix": "a",
}

NEUTRAL = [(name, value) for name, values in REFUSED.items() for value in values]


def parse(**fields: Any) -> CompletionBody:
    return parse_completion(json.dumps({"model": "m", "prompt": "p", **fields}).encode())


def refusal(body: bytes | None = None, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(**fields) if body is None else parse_completion(body)
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
    parse(**{name: value})


@pytest.mark.parametrize("name", sorted(NO_EFFECT))
@pytest.mark.parametrize("value", ["x", True, {"deep": [{"er": 1}]}], ids=repr)
def test_bookkeeping_fields_take_anything(name: str, value: Any) -> None:
    parse(**{name: value})


@pytest.mark.parametrize("name", sorted({*CONTRACT} - {"model", "prompt"}))
def test_null_means_absent(name: str) -> None:
    assert getattr(parse(**{name: None}), name) is None


def test_an_unknown_field_is_named() -> None:
    error = refusal(temprature=0.5)
    assert (error.param, error.message) == ("temprature", "unknown field 'temprature'")
    assert refusal(**{"a`b\n": 1}).param == "a`b\n"


WRONG_TYPES: list[tuple[str, Any, str]] = [
    ("model", 5, "model: must be a string, got int"),
    ("max_tokens", 1.5, "max_tokens: must be an integer, got float"),
    ("max_tokens", "5", "max_tokens: must be an integer, got str"),
    ("max_tokens", True, "max_tokens: must be an integer, got bool"),
    ("temperature", "hot", "temperature: must be a number, got str"),
    ("temperature", 10**400, "temperature: number out of range"),
    ("logprobs", True, "logprobs: must be an integer, got bool"),
    ("seed", 0.5, "seed: must be an integer, got float"),
    ("stop", [1], "stop[0]: must be a string, got int"),
    ("stop", 1, "stop: must be a string or a list, got int"),
    ("stream", 1, "stream: must be true or false, got int"),
    ("ignore_eos", "yes", "ignore_eos: must be true or false, got str"),
    ("echo", 0, "echo: must be true or false, got int"),
    ("n", True, "n: must be an integer, got bool"),
    ("logit_bias", [], "logit_bias: must be an object, got array"),
    ("logit_bias", {"a": 1}, "logit_bias: a key must be an integer, got str"),
    ("logit_bias", {"01": 1}, "logit_bias: a key must be an integer, got str"),
    ("logit_bias", {"1": "a"}, "logit_bias[...]: must be a number, got str"),
    ("bad_words", "a", "bad_words: must be a list, got str"),
    ("stop_token_ids", ["a"], "stop_token_ids[0]: must be an integer, got str"),
    ("allowed_token_ids", {}, "allowed_token_ids: must be a list, got object"),
    ("cache_salt", 1, "cache_salt: must be a string, got int"),
    ("stream_options", 5, "stream_options: must be an object, got int"),
]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    WRONG_TYPES,
    ids=[f"{w[0]}-{n}" for n, w in enumerate(WRONG_TYPES)],
)
def test_a_wrong_type_is_named(name: str, value: Any, message: str) -> None:
    error = refusal(**{name: value})
    assert error.param == name
    assert error.message == message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include_usage": 1}, "stream_options.include_usage: must be true or false, got int"),
        ({"chunk": 1}, "stream_options: object contains unknown field `chunk`"),
    ],
)
def test_malformed_stream_options(options: Any, message: str) -> None:
    error = refusal(stream=True, stream_options=options)
    assert (error.param, error.message) == ("stream_options", message)


def test_stream_options_are_for_streams() -> None:
    error = refusal(stream_options={"include_usage": True})
    assert error.message == "stream_options: only allowed with stream: true"


@pytest.mark.parametrize("name", ["model", "prompt"])
def test_required_fields(name: str) -> None:
    for value in ({name: None}, {}):
        body = {"model": "m", "prompt": "p"}
        del body[name]
        error = refusal(json.dumps(body | value).encode())
        assert (error.param, error.message) == (name, f"{name}: is required")


def test_a_field_of_megabytes_is_refused_undecoded() -> None:
    error = refusal(stop=["no"] * (1 << 20))
    assert (error.param, error.message) == ("stop", "stop: is longer than 1048576 bytes")
    assert parse(allowed_token_ids=[123_456] * 2**18).allowed_token_ids == [123_456] * 2**18


@pytest.mark.parametrize(
    ("n", "best_of", "num_prompts", "message"),
    [
        (0, None, 1, "n: must be between 1 and 128, got 0"),
        (129, None, 1, "n: must be between 1 and 128, got 129"),
        (None, 2, 1, "best_of: must equal n, which is 1"),
        (3, 2, 1, "best_of: must equal n, which is 3"),
        (128, None, 9, "n: 9 prompts of 128 choices, at most 1024 in all"),
    ],
)
def test_n_and_best_of(n: int, best_of: int, num_prompts: int, message: str) -> None:
    with pytest.raises(ApiError) as caught:
        num_choices(parse(n=n, best_of=best_of), num_prompts)
    assert caught.value.message == message
    assert caught.value.param == message.partition(":")[0]
    assert num_choices(parse(n=4, best_of=4), 2) == 4
    assert num_choices(parse(), 2) == 1


BAD_JSON: list[tuple[str, bytes, str]] = [
    ("empty", b"", "not valid JSON"),
    ("cut", b'{"model":', "not valid JSON"),
    ("trailing", b"{} x", "trailing characters"),
    ("array", b"[]", "must be a JSON object"),
    ("number", b"5", "must be a JSON object"),
    ("nan", b'{"temperature":NaN}', "NaN and Infinity are not numbers"),
    ("infinity", b'{"temperature": -Infinity}', "NaN and Infinity are not numbers"),
    ("overflow", b'{"temperature":1e999}', "out of range"),
    ("digits", b'{"temperature":' + b"9" * 5000 + b"}", "out of range"),
    ("deep", b'{"model":' + b"[" * 100_000, "nested too deeply"),
    ("deep bookkeeping", b'{"user":' + b"[" * 100_000, "nested too deeply"),
    ("lone surrogate", b'{"model":"\\ud83d"}', "lone surrogate"),
    ("lone surrogate, more", b'{"model":"\\ud83d and more"}', "lone surrogate"),
    ("low surrogate", b'{"model":"\\udc00 and more"}', "lone surrogate"),
    ("utf-8", b'{"model":"\xff"}', "not valid JSON"),
    ("utf-8 in bookkeeping", b'{"user":"\xff"}', "not valid JSON"),
    ("surrogate in bookkeeping", b'{"user":["\\ud83d"]}', "lone surrogate"),
    ("utf-8 surrogate", b'{"model":"\xed\xa0\x80"}', "not valid JSON"),
    ("single quotes", b"{'a':1}", "not valid JSON"),
    ("bom", b"\xef\xbb\xbf{}", "not valid JSON"),
]


@pytest.mark.parametrize(
    ("body", "message"), [case[1:] for case in BAD_JSON], ids=[case[0] for case in BAD_JSON]
)
def test_bad_json_is_refused_with_a_reason(body: bytes, message: str) -> None:
    assert message in refusal(body).message


def test_a_surrogate_pair_is_a_character() -> None:
    assert parse_completion(b'{"prompt":"a","model":"\\ud83d\\ude00"}').model == "\U0001f600"


SCHEMAS = completion_schemas()
PROPERTIES: dict[str, Any] = SCHEMAS["CompletionBody"]["properties"]


def test_the_schema_has_every_field_and_no_other() -> None:
    assert set(PROPERTIES) == set(CONTRACT)
    assert SCHEMAS["CompletionBody"]["additionalProperties"] is False
    assert SCHEMAS["CompletionBody"]["required"] == ["model", "prompt"]


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_the_schema_has_the_accepted_values_of_a_refused_field(name: str) -> None:
    for value in PROPERTIES[name]["enum"]:
        parse(**{name: value})
    assert ASKING[name] not in PROPERTIES[name]["enum"]


def test_the_schema_of_bookkeeping_fields_takes_anything() -> None:
    for name in NO_EFFECT:
        assert set(PROPERTIES[name]) == {"description"}
