"""What a completion request and its answers look like on the wire, and what is refused.

Owns JSON parsing, field types, the table of refused fields and the response structs. Limits that
depend on the model (context, vocabulary, served names) are checked in completions.py; ranges of
sampling parameters are SamplingParams'.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from deltaserve.engine.sampling_params import SamplingParams

from .errors import ApiError

MAX_PROMPTS = 1024
MAX_STOP_CHARS = 1024

# Fields of the contract that this server cannot honour yet: name -> values that ask for nothing,
# which clients send as defaults and which are accepted. Anything else is a 400 naming the field.
REFUSED: dict[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "best_of": (1,),
    "cache_salt": (),
    "echo": (False,),
    "frequency_penalty": (0,),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "n": (1,),
    "presence_penalty": (0,),
    "priority": (0,),
    "prompt_logprobs": (),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "return_token_ids": (False,),
    "skip_special_tokens": (True,),
    "stop_token_ids": ([],),
    "structured_outputs": (),
    "suffix": ("",),
}

# OpenAI's bookkeeping: accepted, no effect.
NO_EFFECT = frozenset(
    {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
)

_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "logprobs")
HONOURED = frozenset(
    {"model", "prompt", "stream", "stream_options", "stop", "ignore_eos", *_SAMPLING}
)


@dataclass(frozen=True)
class CompletionRequest:
    """A well-formed request. `prompts` are all texts or all token ids."""

    model: str
    prompts: tuple[str, ...] | tuple[list[int], ...]
    params: SamplingParams
    stream: bool
    include_usage: bool


class Logprobs(msgspec.Struct):
    """OpenAI's legacy form: four lists, one entry a token."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]]
    text_offset: list[int]


class Choice(msgspec.Struct):
    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(msgspec.Struct):
    """A whole answer or one chunk of a stream; `usage` is left out where it is not asked for."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    object: str = "text_completion"


def parse_json(body: bytes) -> dict[str, Any]:
    """A JSON object by RFC 8259; raises ApiError 400 for everything else."""
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {_why(body, str(error))}") from None
    if not isinstance(value, dict):
        raise ApiError(400, "the body must be a JSON object")
    return value


def parse_completion(body: dict[str, Any]) -> CompletionRequest:
    """Raises ApiError 400 that names the field. Null means absent."""
    fields = {name: value for name, value in body.items() if value is not None}
    for name, value in fields.items():
        if name in HONOURED or name in NO_EFFECT:
            continue
        if name not in REFUSED:
            raise _invalid(name, f"unknown field {name[:100]!r}")
        if not any(_same(value, neutral) for neutral in REFUSED[name]):
            raise _invalid(name, f"{name}: not supported by this server")
    for name in ("model", "prompt"):
        if name not in fields:
            raise _invalid(name, f"{name}: is required")
    stream = _boolean(fields, "stream")
    return CompletionRequest(
        model=_string(fields, "model"),
        prompts=_prompts(fields["prompt"]),
        params=_sampling_params(fields),
        stream=stream,
        include_usage=_include_usage(fields.get("stream_options"), stream),
    )


def _why(body: bytes, message: str) -> str:
    if "surrogate" in message or re.search(
        rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])", body
    ):
        return "a string holds a lone surrogate"
    if re.search(rb"[:\[,]\s*-?(NaN|Infinity)\b", body):
        return "NaN and Infinity are not numbers in JSON"
    return message


def _same(value: Any, neutral: Any) -> bool:
    return bool(value == neutral) and isinstance(value, bool) == isinstance(neutral, bool)


def _invalid(param: str, message: str) -> ApiError:
    return ApiError(400, message, param[:100])


def _sampling_params(fields: dict[str, Any]) -> SamplingParams:
    chosen = {name: fields[name] for name in _SAMPLING if name in fields}
    try:
        return SamplingParams(
            **chosen, stop=_stop(fields.get("stop", [])), ignore_eos=_boolean(fields, "ignore_eos")
        )
    except ValueError as error:
        message = str(error)
        raise _invalid(message.partition(":")[0], message) from None


def _stop(value: Any) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise _invalid("stop", "stop: must be a string or a list of strings")
    if any(len(text) > MAX_STOP_CHARS for text in texts):
        raise _invalid("stop", f"stop: a string may have at most {MAX_STOP_CHARS} characters")
    return tuple(texts)


def _prompts(value: Any) -> tuple[str, ...] | tuple[list[int], ...]:
    """String, list of strings, token ids, or list of lists of token ids."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise _invalid("prompt", "prompt: must be a string or a list")
    kinds = set(map(type, value))
    if kinds == {int}:
        return (value,)
    if not (kinds <= {str} or kinds <= {list}):
        raise _invalid(
            "prompt",
            "prompt: must be a string, a list of strings, a list of token ids or a list of those",
        )
    if any(set(map(type, item)) - {int} for item in value if isinstance(item, list)):
        raise _invalid("prompt", "prompt: token ids must be integers")
    if not value or not all(value):
        raise _invalid("prompt", "prompt: must not be empty")
    if len(value) > MAX_PROMPTS:
        raise _invalid("prompt", f"prompt: at most {MAX_PROMPTS} prompts, got {len(value)}")
    return tuple(value)


def _include_usage(options: Any, stream: bool) -> bool:
    if options is None:
        return False
    if not isinstance(options, dict):
        raise _invalid("stream_options", "stream_options: must be an object")
    if not stream:
        raise _invalid("stream_options", "stream_options: only allowed with stream: true")
    fields = {name: value for name, value in options.items() if value is not None}
    for name in fields:
        if name not in ("include_usage", "continuous_usage_stats"):
            raise _invalid("stream_options", f"stream_options: unknown field {name[:100]!r}")
    if _boolean(fields, "continuous_usage_stats", "stream_options."):
        raise _invalid("stream_options", "stream_options.continuous_usage_stats: not supported")
    return _boolean(fields, "include_usage", "stream_options.")


def _boolean(fields: dict[str, Any], name: str, prefix: str = "") -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        raise _invalid(prefix + name, f"{prefix}{name}: must be true or false")
    return value


def _string(fields: dict[str, Any], name: str) -> str:
    value = fields[name]
    if not isinstance(value, str):
        raise _invalid(name, f"{name}: must be a string")
    return value
