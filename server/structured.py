"""What a request's output must look like -> a `Grammar`: OpenAI's `response_format`, and vLLM's
`structured_outputs` and `guided_*`.

Owns these fields' types. Whether a schema or expression is one is the engine's to say, which
refuses what it cannot compile with a 400 that names the field. The grammar of tool calls is
`tool_grammar`.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from deltaserve.engine.grammar import MAX_CHOICES, Grammar, GrammarError

from .json_body import invalid

JsonSchema = dict[str, Any] | bool | str
"""As an object, or as the JSON text of one."""
Text = Annotated[str, Meta(extra_json_schema={"minLength": 1})]
Choices = Annotated[list[Text], Meta(extra_json_schema={"minItems": 1})]
_COMPACT = {"whitespace_flexible": False, "whitespace_pattern": None}


class JsonSchemaFormat(msgspec.Struct, forbid_unknown_fields=True):
    """`strict` is how it is always done."""

    schema: dict[str, Any] | bool
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Annotated[str, Meta(extra_json_schema={"enum": ["text", "json_object", "json_schema"]})]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputs(msgspec.Struct, forbid_unknown_fields=True):
    """One of the first five; the others are of JSON alone."""

    json: JsonSchema | None = None
    json_object: bool | None = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    whitespace_pattern: str | None = None
    disable_any_whitespace: bool | None = None
    disable_fallback: bool | None = None


class StructuredFields(Protocol):
    """The part of a request's fields that is read here."""

    response_format: ResponseFormat | None
    structured_outputs: StructuredOutputs | None
    guided_json: JsonSchema | None
    guided_regex: str | None
    guided_choice: list[str] | None
    guided_grammar: str | None


def grammar_of(fields: StructuredFields, start_after: tuple[int, ...] = ()) -> Grammar | None:
    """What the output must follow, from behind the ids `start_after` on; None where it is free.
    Raises ApiError 400, also where several fields ask for something."""
    asked = [
        ("response_format", _response_format(fields.response_format)),
        ("structured_outputs", _structured_outputs(fields.structured_outputs)),
        ("guided_json", _json_schema(fields.guided_json, {})),
        ("guided_regex", _one("regex", fields.guided_regex)),
        ("guided_choice", _choice(fields.guided_choice, "guided_choice")),
        ("guided_grammar", _one("grammar", fields.guided_grammar)),
    ]
    found = [(name, *grammar) for name, grammar in asked if grammar is not None]
    if not found:
        return None
    if len(found) > 1:
        raise invalid(found[1][0], f"{found[1][0]}: not together with {found[0][0]}")
    name, kind, text = found[0]
    return make_grammar(kind, text, start_after, name)


def make_grammar(kind: str, text: str, start_after: tuple[int, ...], field: str) -> Grammar:
    """Raises ApiError 400 that names `field`."""
    try:
        return Grammar(kind, text, start_after, field)
    except GrammarError as error:
        raise invalid(field, str(error)) from None


_KindAndText = tuple[str, str] | None


def _response_format(value: ResponseFormat | None) -> _KindAndText:
    if value is None or value.type == "text":
        return None
    if value.type == "json_object":
        return _json_schema({"type": "object"}, {})
    if value.type != "json_schema":
        raise invalid(
            "response_format",
            "response_format.type: must be text, json_object or json_schema, got "
            f"{value.type[:100]!r}",
        )
    if value.json_schema is None:
        raise invalid("response_format", "response_format.json_schema: is required")
    return _json_schema(value.json_schema.schema, {})


def _structured_outputs(value: StructuredOutputs | None) -> _KindAndText:
    if value is None:
        return None
    options: dict[str, Any] = {}
    if value.disable_any_whitespace:
        options = _COMPACT
    elif value.whitespace_pattern is not None:
        options = {"whitespace_pattern": value.whitespace_pattern}
    found = [
        _json_schema(value.json, options),
        _json_schema({"type": "object"} if value.json_object else None, options),
        _one("regex", value.regex),
        _choice(value.choice, "structured_outputs"),
        _one("grammar", value.grammar),
    ]
    asked = [grammar for grammar in found if grammar is not None]
    if len(asked) != 1:
        raise invalid(
            "structured_outputs",
            "structured_outputs: needs exactly one of json, json_object, regex, choice and grammar",
        )
    return asked[0]


def _one(kind: str, text: str | None) -> _KindAndText:
    return None if text is None else (kind, text)


def _choice(choices: list[str] | None, field: str) -> _KindAndText:
    if choices is None:
        return None
    if not 1 <= len(choices) <= MAX_CHOICES or "" in choices:
        message = f"there must be 1 to {MAX_CHOICES} choices, none of them empty"
        raise invalid(field, f"{field}: {message}")
    return "choice", json.dumps(choices)


def _json_schema(schema: JsonSchema | None, options: dict[str, Any]) -> _KindAndText:
    """`options`: of llguidance, which reads them in the schema."""
    if schema is None:
        return None
    if isinstance(schema, str) and not options:
        return "json_schema", schema
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise invalid(
                "structured_outputs", f"structured_outputs.json: not valid JSON: {error}"
            ) from None
    if schema is True or schema is False:
        schema = {} if schema else {"not": {}}
    if options and isinstance(schema, dict):
        schema = {"x-guidance": options, **schema}
    return "json_schema", json.dumps(schema, ensure_ascii=False)
