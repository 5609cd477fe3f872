"""SamplingParams: what is refused, by name and with its limit, and what passes at the limits."""

from __future__ import annotations

import math
from typing import Any

import pytest

from deltaserve.engine import sampling_params
from deltaserve.engine.messages import Add, decode_from_client, encode
from deltaserve.engine.sampling_params import SamplingParams

BIASES = sampling_params.MAX_LOGIT_BIAS
STOP_IDS = sampling_params.MAX_STOP_TOKEN_IDS
WORDS, WORD_IDS = sampling_params.MAX_BAD_WORDS, sampling_params.MAX_BAD_WORD_IDS
ALLOWED = sampling_params.MAX_ALLOWED_TOKEN_IDS


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("presence_penalty", 2.1, "must be in"),
        ("presence_penalty", math.nan, "must be in"),
        ("frequency_penalty", -2.1, "must be in"),
        ("frequency_penalty", "1", "must be a number"),
        ("repetition_penalty", 0.0, "must be in"),
        ("repetition_penalty", math.inf, "must be in"),
        ("logit_bias", ((1, 100.5),), "must be in"),
        ("logit_bias", ((-1, 1.0),), "must be between 0"),
        ("logit_bias", ((1, 1.0), (1, 2.0)), "twice"),
        ("logit_bias", tuple((i, 0.0) for i in range(BIASES + 1)), f"at most {BIASES}"),
        ("allowed_token_ids", (), "must not be empty"),
        ("allowed_token_ids", (1, True), "must be an integer"),
        ("allowed_token_ids", (0,) * (ALLOWED + 1), f"at most {ALLOWED}"),
        ("bad_words", ((),), "at least one"),
        ("bad_words", ((1, -2),), "must be between 0"),
        ("bad_words", ((1,),) * (WORDS + 1), f"at most {WORDS}"),
        ("bad_words", ((1,) * (WORD_IDS + 1),), f"at most {WORD_IDS}"),
        ("min_tokens", 17, "at most max_tokens (16)"),
        ("min_tokens", -1, "must be between 0"),
        ("max_tokens", 0, "must be between 1"),
        ("stop_token_ids", (1.0,), "must be an integer"),
        ("stop_token_ids", tuple(range(STOP_IDS + 1)), f"at most {STOP_IDS}"),
        ("prompt_logprobs", 21, "must be between 0 and 20"),
        ("priority", 2**31, "must be between"),
        ("ignore_eos", 1, "must be true or false"),
        ("skip_special_tokens", None, "must be true or false"),
        ("include_stop_str_in_output", "no", "must be true or false"),
        ("cache_salt", "", "must not be empty"),
        ("cache_salt", "x" * 257, "at most 256 characters"),
        ("cache_salt", "a\ud800", "lone surrogate"),
        ("cache_salt", 5, "must be a string"),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 30 else "",
)
def test_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        SamplingParams(**{name: value})
    assert str(refusal.value).startswith(f"{name}: ")
    assert message in str(refusal.value)


AT_THE_LIMITS = SamplingParams(
    max_tokens=0,
    presence_penalty=-2.0,
    frequency_penalty=2,
    repetition_penalty=0.01,
    logit_bias=tuple((i, -100) for i in range(BIASES)),
    allowed_token_ids=(0,),
    bad_words=((1,) * WORD_IDS,) * WORDS,
    stop_token_ids=tuple(range(STOP_IDS)),
    prompt_logprobs=0,
    priority=-(2**31),
    cache_salt="x" * 256,
)


def test_limits_are_inclusive_and_survive_the_way_to_the_engine() -> None:
    message = Add("a", [1], AT_THE_LIMITS)
    assert decode_from_client(encode(message)) == message


@pytest.mark.parametrize(
    ("params", "uses"),
    [
        ({}, False),
        ({"presence_penalty": 0.1}, True),
        ({"frequency_penalty": -0.1}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"logit_bias": ((1, 1.0),)}, False),
    ],
)
def test_uses_penalties(params: dict[str, Any], uses: bool) -> None:
    assert SamplingParams(**params).uses_penalties is uses
