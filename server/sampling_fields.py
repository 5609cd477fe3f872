"""The sampling fields of a request, over the checkpoint's defaults, as SamplingParams.

Ranges are SamplingParams' own; here is what JSON writes otherwise: words as text, biases by id, and
what `echo` and `n` ask of the engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.tokenizer import Tokenizer

from .json_body import invalid
from .protocol import MAX_STOP_CHARS, MAX_WORD_CHARS, MAX_WORDS, CompletionBody, SamplingFields
from .structured import grammar_of

MANY_IDS = 4096

# As SamplingParams has them.
_SAME = (
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "ignore_eos",
    "include_stop_str_in_output",
    "skip_special_tokens",
    "priority",
    "cache_salt",
)
_TUPLES = ("stop_token_ids", "allowed_token_ids")


async def completion_params(
    fields: CompletionBody, defaults: Mapping[str, Any], tokenizer: Tokenizer, vocab_limit: int
) -> SamplingParams:
    """Raises ApiError 400 that names the field. `defaults`: SamplingParams' fields by name."""
    own = {
        "max_tokens": fields.max_tokens,
        "logprobs": fields.logprobs,
        "prompt_logprobs": _echo_logprobs(fields) if fields.echo else fields.prompt_logprobs,
        "grammar": grammar_of(fields),
    }
    return await sampling_params(fields, {**defaults, **_given(own)}, tokenizer, vocab_limit)


async def sampling_params(
    fields: SamplingFields, chosen: Mapping[str, Any], tokenizer: Tokenizer, vocab_limit: int
) -> SamplingParams:
    """`chosen`: SamplingParams' fields that are not the same in all bodies, and defaults. Raises
    ApiError 400 that names the field."""
    ids = fields.allowed_token_ids or ()
    if len(ids) > MANY_IDS or fields.bad_words:
        return await asyncio.to_thread(_build, fields, chosen, tokenizer, vocab_limit)
    return _build(fields, chosen, tokenizer, vocab_limit)


def of_choice(params: SamplingParams, number: int) -> SamplingParams:
    """The parameters of the `number`-th of n choices: seeds count up from the request's, and the
    prompt's log-probabilities are computed for the first (for all that ask for nothing else)."""
    if number == 0:
        return params
    if params.prompt_logprobs is not None and params.max_tokens > 0:
        params = replace(params, prompt_logprobs=None)
    if params.seed is None:
        return params
    seed = params.seed + number
    return replace(params, seed=seed if seed < 2**64 else seed - 2**64)


def _build(
    fields: SamplingFields, given: Mapping[str, Any], tokenizer: Tokenizer, vocab_limit: int
) -> SamplingParams:
    chosen = {**given, **_given({name: getattr(fields, name) for name in _SAME})}
    for name in _TUPLES:
        value = getattr(fields, name)
        if value is not None:
            chosen[name] = tuple(value)
    if fields.logit_bias is not None:
        chosen["logit_bias"] = tuple(fields.logit_bias.items())
    chosen["stop"] = _stop(fields.stop)
    try:
        if fields.bad_words:
            chosen["bad_words"] = _bad_words(fields.bad_words, tokenizer)
        params = SamplingParams(**chosen)
        params.check_token_ids(vocab_limit)
    except ValueError as error:
        message = str(error)
        name = message.partition(":")[0]
        if name not in fields.__struct_fields__:  # a number too long to be shown
            name, message = _too_long(chosen)
        raise invalid(name, message) from None
    return params


def _given(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _echo_logprobs(fields: CompletionBody) -> int | None:
    """Echoed log-probabilities are the prompt's, at least as many as are asked for otherwise. A
    request for the prompt alone (max_tokens 0) is one for log-probabilities, seen or not."""
    wanted = [n for n in (fields.logprobs, fields.prompt_logprobs) if n is not None]
    if not wanted and fields.max_tokens == 0:
        return 0
    return max(wanted, default=None)


def _stop(value: str | list[str] | None) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value or []
    if any(len(text) > MAX_STOP_CHARS for text in texts):
        raise invalid("stop", f"stop: a string may have at most {MAX_STOP_CHARS} characters")
    return tuple(texts)


def _bad_words(words: list[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    if len(words) > MAX_WORDS:
        raise invalid("bad_words", f"bad_words: at most {MAX_WORDS} words, got {len(words)}")
    if any(len(word) > MAX_WORD_CHARS for word in words):
        raise invalid(
            "bad_words", f"bad_words: a word may have at most {MAX_WORD_CHARS} characters"
        )
    return tokenizer.bad_words(words)


def _too_long(chosen: Mapping[str, Any]) -> tuple[str, str]:
    for name, value in chosen.items():
        if isinstance(value, int) and abs(value) >= 1 << 64:
            return name, f"{name}: is out of range"
    raise AssertionError("an error of SamplingParams that names no field")
