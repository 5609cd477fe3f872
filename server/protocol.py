"""What a completion request and its answers look like on the wire, and what is refused.

Owns the fields with their types and published ranges, the table of refused fields and the response
structs. Ranges are enforced where parameters are made (SamplingParams); limits that depend on the
model (context, vocabulary, served names) in prompts.py and completions.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import UNSET, Meta, Raw, UnsetType

from deltaserve.engine.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORDS,
    MAX_CACHE_SALT_CHARS,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)

from .json_body import BodyParser, invalid
from .structured import Choices, JsonSchema, ResponseFormat, StructuredOutputs, Text

MAX_N = 128
MAX_CHOICES = 1024
"""Prompts times n of one request."""
MAX_STOP_CHARS = 1024
MAX_WORDS = (
    MAX_BAD_WORDS // 2
)  # each may be two sequences of ids: with a space before it and without
MAX_WORD_CHARS = 1024

# Fields of the contract that are not honoured: name -> values that ask for nothing, which
# clients send as defaults and which are accepted. Anything else is a 400 naming the field.
REFUSED: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
}

# OpenAI's bookkeeping: accepted, no effect.
NO_EFFECT = frozenset(
    {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
)

INT32 = 2**31 - 1


def says(**schema: Any) -> Meta:
    """Published, not enforced: what enforces it has the better message."""
    return Meta(extra_json_schema=schema)


_TokenId = Annotated[int, says(minimum=0, maximum=INT32)]


class StreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """What /v1/completions and /v1/chat/completions have in common. Null means absent."""

    model: str
    min_tokens: Annotated[int, says(minimum=0, maximum=INT32)] | None = None
    temperature: Annotated[float, says(minimum=0, maximum=100)] | None = None
    top_p: Annotated[float, says(exclusiveMinimum=0, maximum=1)] | None = None
    top_k: Annotated[int, says(minimum=-1, maximum=INT32)] | None = None
    min_p: Annotated[float, says(minimum=0, maximum=1)] | None = None
    presence_penalty: Annotated[float, says(minimum=-2, maximum=2)] | None = None
    frequency_penalty: Annotated[float, says(minimum=-2, maximum=2)] | None = None
    repetition_penalty: Annotated[float, says(minimum=0.01, maximum=100)] | None = None
    logit_bias: (
        Annotated[
            dict[int, Annotated[float, says(minimum=-100, maximum=100)]],
            says(maxProperties=MAX_LOGIT_BIAS, propertyNames={"pattern": "^(0|[1-9][0-9]*)$"}),
        ]
        | None
    ) = None
    seed: Annotated[int, says(minimum=-(2**63), maximum=2**64 - 1)] | None = None
    stop: (
        Annotated[str, says(minLength=1, maxLength=MAX_STOP_CHARS)]
        | Annotated[
            list[Annotated[str, says(minLength=1, maxLength=MAX_STOP_CHARS)]],
            says(maxItems=MAX_STOP_STRINGS),
        ]
        | None
    ) = None
    stop_token_ids: Annotated[list[_TokenId], says(maxItems=MAX_STOP_TOKEN_IDS)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    allowed_token_ids: (
        Annotated[list[_TokenId], says(minItems=1, maxItems=MAX_ALLOWED_TOKEN_IDS)] | None
    ) = None
    bad_words: (
        Annotated[
            list[Annotated[str, says(minLength=1, maxLength=MAX_WORD_CHARS)]],
            says(maxItems=MAX_WORDS),
        ]
        | None
    ) = None
    prompt_logprobs: Annotated[int, says(minimum=0, maximum=MAX_LOGPROBS)] | None = None
    n: Annotated[int, says(minimum=1, maximum=MAX_N)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    priority: Annotated[int, says(minimum=-(2**31), maximum=INT32)] | None = None
    cache_salt: Annotated[str, says(minLength=1, maxLength=MAX_CACHE_SALT_CHARS)] | None = None
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None


class CompletionBody(SamplingFields, kw_only=True):
    """The fields of a request to /v1/completions."""

    prompt: Raw
    max_tokens: Annotated[int, says(minimum=0, maximum=INT32, default=16)] | None = None
    logprobs: Annotated[int, says(minimum=0, maximum=MAX_LOGPROBS)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, says(minimum=1, maximum=MAX_N)] | None = None
    suffix: Any = None


HONOURED = frozenset(CompletionBody.__struct_fields__) - NO_EFFECT - frozenset(REFUSED)


class Logprobs(msgspec.Struct):
    """OpenAI's legacy form: four lists, one entry a token. The first token of an echoed prompt has
    nothing before it and so no log-probability."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct):
    """One entry of vLLM's `prompt_logprobs`: each position maps token ids to these."""

    logprob: float
    rank: int | None
    decoded_token: str


PromptLogprobs = list[dict[int, PromptLogprob] | None]


class Choice(msgspec.Struct):
    """The last three are there where they were asked for."""

    index: int
    text: str
    logprobs: Logprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    reasoning_tokens: int


class Usage(msgspec.Struct):
    """`prompt_tokens` counts each prompt once, whatever n. Details of the prompt are there for
    cache hits, those of the completion in chats."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class Completion(msgspec.Struct):
    """A whole answer or one chunk of a stream; `usage` is left out where it is not asked for."""

    id: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | UnsetType | None = UNSET
    object: str = "text_completion"


LONG_FIELDS = {"allowed_token_ids": 12 * MAX_ALLOWED_TOKEN_IDS}
"""Bytes of fields that may be longer than others."""
_parser = BodyParser(CompletionBody, LONG_FIELDS)


def parse_completion(body: bytes) -> CompletionBody:
    """Field types and refused fields; prompts and parameters are read from the result. Raises
    ApiError 400 that names the field."""
    fields = _parser.parse(body)
    check_fields(fields, REFUSED)
    return fields


def check_fields(fields: SamplingFields, refused: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises ApiError 400 for a refused field that asks for something."""
    for name, neutral in refused.items():
        value = getattr(fields, name)
        if value is not None and value not in neutral:
            raise invalid(name, f"{name}: not supported by this server")
    if fields.stream_options is not None and not fields.stream:
        raise invalid("stream_options", "stream_options: only allowed with stream: true")


def num_choices(fields: SamplingFields, num_prompts: int) -> int:
    """n. Raises ApiError 400, also for a best_of that would choose among more."""
    n = 1 if fields.n is None else fields.n
    if not 1 <= n <= MAX_N:
        raise invalid("n", f"n: must be between 1 and {MAX_N}, got {n}")
    if isinstance(fields, CompletionBody) and fields.best_of not in (None, n):
        raise invalid("best_of", f"best_of: must equal n, which is {n}")
    if n * num_prompts > MAX_CHOICES:
        raise invalid("n", f"n: {num_prompts} prompts of {n} choices, at most {MAX_CHOICES} in all")
    return n


def completion_schemas(ref_template: str = "#/components/schemas/{name}") -> dict[str, Any]:
    """JSON schemas by name: CompletionBody, Completion (also of a chunk) and what they refer to."""
    _, schemas = msgspec.json.schema_components(
        (CompletionBody, Completion), ref_template=ref_template
    )
    describe_fields(schemas["CompletionBody"], REFUSED)
    schemas["CompletionBody"]["properties"]["prompt"] = PROMPT_SCHEMA
    return schemas


def describe_fields(schema: dict[str, Any], refused: Mapping[str, tuple[Any, ...]]) -> None:
    """What the types alone do not say, in the schema of a body."""
    schema["additionalProperties"] = False
    for name, neutral in refused.items():
        schema["properties"][name] = {"enum": [*neutral, None], "description": "not supported"}
    for name in NO_EFFECT:
        schema["properties"][name] = {"description": "accepted, no effect"}


_IDS_SCHEMA = {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}}
PROMPT_SCHEMA: dict[str, Any] = {
    "description": "text, texts, token ids or lists of token ids",
    "anyOf": [
        {"type": "string", "minLength": 1},
        {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_CHOICES,
            "items": {"type": "string", "minLength": 1},
        },
        _IDS_SCHEMA,
        {"type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": _IDS_SCHEMA},
    ],
}
