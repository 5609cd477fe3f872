"""The published ranges of sampling fields are the enforced ones, and fields override defaults."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from deltaserve.engine.generation_config import read_sampling_defaults
from deltaserve.engine.json_section import CheckpointError
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.tokenizer import Tokenizer
from deltaserve.server.errors import ApiError
from deltaserve.server.protocol import completion_schemas, num_choices, parse_completion
from deltaserve.server.sampling_fields import completion_params, of_choice

from .tiny_checkpoint import NUM_TOKENS, write_tokenizer

PROPERTIES: dict[str, Any] = completion_schemas()["CompletionBody"]["properties"]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return Tokenizer(path)


def params(
    tokenizer: Tokenizer, defaults: dict[str, Any] | None = None, **fields: Any
) -> SamplingParams:
    body = parse_completion(json.dumps({"model": "m", "prompt": "p", **fields}).encode())
    num_choices(body, 1)
    return asyncio.run(completion_params(body, defaults or {}, tokenizer, NUM_TOKENS))


def test_nothing_said_is_sampling_params_own_defaults(tokenizer: Tokenizer) -> None:
    assert params(tokenizer) == SamplingParams()


SAME = [
    ("max_tokens", 7),
    ("min_tokens", 7),
    ("temperature", 0),
    ("top_p", 0.5),
    ("top_k", -1),
    ("min_p", 0.1),
    ("presence_penalty", -2),
    ("frequency_penalty", 2),
    ("repetition_penalty", 1.5),
    ("seed", 2**64 - 1),
    ("logprobs", 20),
    ("prompt_logprobs", 0),
    ("ignore_eos", True),
    ("include_stop_str_in_output", True),
    ("skip_special_tokens", False),
    ("priority", -5),
    ("cache_salt", "mine"),
]


@pytest.mark.parametrize(("name", "value"), SAME)
def test_a_field_is_the_parameter_of_its_name(tokenizer: Tokenizer, name: str, value: Any) -> None:
    made = params(tokenizer, **{name: value})
    assert made == SamplingParams(**{name: value})
    assert params(tokenizer, {name: getattr(made, name)}) == made
    assert params(tokenizer, {name: None}, **{name: value}) == made


def test_lists_and_maps(tokenizer: Tokenizer) -> None:
    made = params(
        tokenizer,
        stop="a",
        stop_token_ids=[3, 4],
        allowed_token_ids=[5, 6],
        logit_bias={"7": -1, "8": 0.5},
        bad_words=["the", "x"],
    )
    the, space_the = tokenizer.encode("the"), tokenizer.encode(" the")
    assert (len(the), len(space_the)) == (2, 1)
    assert made == SamplingParams(
        stop=("a",),
        stop_token_ids=(3, 4),
        allowed_token_ids=(5, 6),
        logit_bias=((7, -1.0), (8, 0.5)),
        bad_words=(tuple(the), (ord("x"),)),
    )
    # one token with its space as without: both
    assert params(tokenizer, bad_words=[" a", "s"]).bad_words == (
        (ord("a"),),
        tuple(tokenizer.encode(" a")),
        (ord("s"),),
        tuple(tokenizer.encode(" s")),
    )


@pytest.mark.parametrize(
    ("fields", "asked"),
    [
        ({}, None),
        ({"logprobs": 2}, 2),
        ({"logprobs": 2, "prompt_logprobs": 4}, 4),
        ({"logprobs": 3, "prompt_logprobs": 1}, 3),
        ({"max_tokens": 0}, 0),
        ({"max_tokens": 0, "logprobs": 5}, 5),
    ],
)
def test_what_echo_asks_of_the_engine(
    tokenizer: Tokenizer, fields: dict[str, Any], asked: int | None
) -> None:
    assert params(tokenizer, echo=True, **fields).prompt_logprobs == asked


def test_seeds_of_choices() -> None:
    unseeded = SamplingParams()
    assert of_choice(unseeded, 5) is unseeded
    seeds = [of_choice(SamplingParams(seed=2**64 - 2), number).seed for number in range(3)]
    assert seeds == [2**64 - 2, 2**64 - 1, 0]
    assert of_choice(SamplingParams(seed=-1), 1).seed == 0


def test_the_first_choice_computes_log_probabilities_of_the_prompt() -> None:
    params = SamplingParams(prompt_logprobs=2)
    assert of_choice(params, 0) is params
    assert of_choice(params, 1).prompt_logprobs is None
    alone = SamplingParams(prompt_logprobs=2, max_tokens=0)
    assert of_choice(alone, 1) is alone


def ranged() -> list[tuple[str, dict[str, Any]]]:
    """(field, schema) of each number with published limits."""
    found = []
    for name, schema in PROPERTIES.items():
        for option in schema.get("anyOf", ()):
            if option.get("type") in ("integer", "number") and name != "prompt":
                found.append((name, option))
    return found


@pytest.mark.parametrize(("name", "schema"), ranged(), ids=[name for name, _ in ranged()])
def test_the_published_range_is_the_enforced_one(
    tokenizer: Tokenizer, name: str, schema: dict[str, Any]
) -> None:
    others: dict[str, Any] = {
        "max_tokens": {"echo": True},
        "min_tokens": {"max_tokens": 2**31 - 1},
    }.get(name, {})
    step: float = 1 if schema["type"] == "integer" else 1e-6
    lowest = schema.get("minimum", schema.get("exclusiveMinimum"))
    inside = [lowest if "minimum" in schema else lowest + step, schema["maximum"]]
    outside = [lowest - step if "minimum" in schema else lowest, schema["maximum"] + step]
    for value in inside:
        equal = {"n": value} if name == "best_of" else {}
        params(tokenizer, **{**others, **equal, name: value})
    for value in outside:
        with pytest.raises(ApiError) as caught:
            params(tokenizer, **{**others, name: value})
        assert caught.value.param == name


# field, keyword of its schema, the most or least it says, and values inside and outside
SIZED: list[tuple[str, str, Any, Any, Any]] = [
    ("stop", "maxItems", 16, ["a"] * 16, ["a"] * 17),
    ("stop", "maxLength", 1024, "a" * 1024, ["a" * 1025]),
    ("stop", "minLength", 1, ["a"], [""]),
    ("stop_token_ids", "maxItems", 128, [1] * 128, [1] * 129),
    ("stop_token_ids", "minimum", 0, [0], [-1]),
    ("allowed_token_ids", "minItems", 1, [1], []),
    ("allowed_token_ids", "maxItems", 2**18, [1] * 2**18, [1] * (2**18 + 1)),
    ("bad_words", "maxItems", 64, ["a"] * 64, ["a"] * 65),
    ("bad_words", "maxLength", 1024, ["a" * 16], ["a" * 1025]),
    ("bad_words", "minLength", 1, ["a"], [""]),
    ("logit_bias", "maximum", 100, {"1": 100}, {"1": 100.1}),
    ("logit_bias", "minimum", -100, {"1": -100}, {"1": -100.1}),
    ("cache_salt", "maxLength", 256, "a" * 256, "a" * 257),
    ("cache_salt", "minLength", 1, "a", ""),
]


@pytest.mark.parametrize(
    ("name", "keyword", "limit", "inside", "outside"),
    SIZED,
    ids=[f"{name} {keyword}" for name, keyword, *_ in SIZED],
)
def test_the_published_sizes_are_the_enforced_ones(
    tokenizer: Tokenizer, name: str, keyword: str, limit: int, inside: Any, outside: Any
) -> None:
    assert f'"{keyword}": {limit}' in json.dumps(PROPERTIES[name])
    params(tokenizer, **{name: inside})
    with pytest.raises(ApiError) as caught:
        params(tokenizer, **{name: outside})
    assert caught.value.param == name


@pytest.mark.parametrize("digits", [30, 5000])
def test_an_absurd_number_is_named(tokenizer: Tokenizer, digits: int) -> None:
    body = b'{"model":"m","prompt":"p","seed":' + b"9" * digits + b"}"
    with pytest.raises(ApiError) as caught:
        asyncio.run(completion_params(parse_completion(body), {}, tokenizer, NUM_TOKENS))
    assert caught.value.param == "seed"


# ---- generation_config.json ----------------------------------------------------------------------


def test_defaults_of_a_checkpoint(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert read_sampling_defaults(tmp_path) == {}
    written = {
        "temperature": 0.6,
        "top_p": 0.95,
        "top_k": 20,
        "min_p": None,
        "repetition_penalty": 1.05,
        "do_sample": False,
        "max_new_tokens": 99,
        "eos_token_id": [1],
    }
    (tmp_path / "generation_config.json").write_text(json.dumps(written))
    defaults = read_sampling_defaults(tmp_path)
    assert params(tokenizer, defaults) == SamplingParams(
        temperature=0.6, top_p=0.95, top_k=20, repetition_penalty=1.05
    )
    assert params(tokenizer, defaults, temperature=0, top_k=0, top_p=1).top_k == 0


@pytest.mark.parametrize("text", ["[]", "{", '{"temperature": "hot"}', '{"top_p": 2}'])
def test_defaults_that_cannot_be_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"generation_config\.json: "):
        read_sampling_defaults(tmp_path)
