"""A tool's parameters: what a value is in JSON, given the text a model wrote and the tool's schema.

The model writes every value as plain text; only the schema says whether `5` is a number or a
string. Where it allows both, what reads as JSON of an allowed type is that, else it is a string.
"""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

ANY = frozenset({"string", "number", "integer", "boolean", "array", "object", "null"})
TEXT = frozenset({"string"})
MAX_SCHEMAS = 256
"""Looked at for one parameter; a schema that refers further is taken to allow anything."""
_WORDS = {"true": True, "false": False, "null": None, "none": None}


class ToolParameters:
    """One tool's `parameters` schema (None: the tool has none). Any schema will do: what is not
    understood allows any type."""

    def __init__(self, schema: Mapping[str, Any] | None) -> None:
        self._root = schema or {}
        properties = self._root.get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        self._others = self._root.get("additionalProperties")
        self._types_of_known: dict[str, frozenset[str]] = {}

    def is_text(self, name: str) -> bool:
        """Whether a value can only be a string, whatever its text."""
        return self._types(name) == TEXT

    def value(self, name: str, text: str) -> str:
        """The JSON of a parameter's value."""
        types = self._types(name)
        if types == TEXT:
            return dumps(text)
        for allowed in self._choices(name):
            if allowed == text:
                return dumps(text)
        found, value = _read(text, types)
        return dumps(value if found else text)

    def _schema(self, name: str) -> Any:
        return self._properties.get(name, self._others)

    def _types(self, name: str) -> frozenset[str]:
        known = self._types_of_known.get(name)
        if known is None:
            known = self._read_types(name)
            if name in self._properties:
                self._types_of_known[name] = known
        return known

    def _read_types(self, name: str) -> frozenset[str]:
        types: set[str] = set()
        for schema in self._alternatives(self._schema(name)):
            types |= _own_types(schema)
        return frozenset(types) or ANY

    def _choices(self, name: str) -> Iterator[str]:
        """The texts among the values that are listed one by one."""
        for schema in self._alternatives(self._schema(name)):
            listed = schema.get("enum")
            values = [schema.get("const"), *(listed if isinstance(listed, list) else ())]
            yield from (value for value in values if isinstance(value, str))

    def _alternatives(self, schema: Any) -> Iterator[dict[str, Any]]:
        """The schemas of which one holds for a value, references followed."""
        open_schemas = [schema]
        for _ in range(MAX_SCHEMAS):
            if not open_schemas:
                return
            schema = open_schemas.pop()
            if not isinstance(schema, dict):
                yield {}
                continue
            reference = schema.get("$ref")
            inner = [part for keyword in ("anyOf", "oneOf") for part in _parts(schema.get(keyword))]
            every = schema.get("allOf")
            if isinstance(reference, str):
                open_schemas.append(self._referred(reference))
            elif "type" in schema or "enum" in schema or "const" in schema:
                yield schema
            elif inner:
                open_schemas += inner
            elif isinstance(every, list) and every:
                typed = [part for part in every if isinstance(part, dict) and part.keys() & _TYPED]
                open_schemas.append((typed or every)[0])
            else:
                yield schema
        yield {}

    def _referred(self, reference: str) -> Any:
        if not reference.startswith("#"):
            return None
        node: Any = self._root
        for part in reference.removeprefix("#").split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            node = node.get(key) if isinstance(node, dict) else None
        return node


def _parts(schemas: Any) -> list[Any]:
    """As many as are looked at at all."""
    return schemas[:MAX_SCHEMAS] if isinstance(schemas, list) else []


_TYPED = {"type", "enum", "const", "$ref", "anyOf", "oneOf"}


def _own_types(schema: Mapping[str, Any]) -> frozenset[str]:
    kinds = schema.get("type")
    names = [kinds] if isinstance(kinds, str) else kinds
    if isinstance(names, list):
        return frozenset(name for name in names if isinstance(name, str)) & ANY or ANY
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and values:
        return frozenset().union(*map(_types_of, values))
    if isinstance(schema.get("properties"), dict):
        return frozenset({"object"})
    return frozenset({"array"}) if "items" in schema else ANY


def _types_of(value: Any) -> frozenset[str]:
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        whole = {"integer"} if math.isfinite(value) and value.is_integer() else set()
        return frozenset({"number", *whole})
    if isinstance(value, str):
        return TEXT
    return frozenset({"array"}) if isinstance(value, list) else frozenset({"object"})


def _read(text: str, types: frozenset[str]) -> tuple[bool, Any]:
    """(whether the text is of one of the types other than string, its value). What could be a
    string must be JSON to be anything else."""
    stripped = text.strip()
    for parse in (_json,) if "string" in types else (_json, _word, _literal):
        try:
            value = parse(stripped)
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            continue
        if isinstance(value, str) or not _types_of(value) & types:
            continue
        if isinstance(value, float) and "number" not in types:
            value = int(value)
        return True, value
    return False, None


def _json(text: str) -> Any:
    value = json.loads(text, parse_constant=_not_json)
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError("out of range")
    return value


def _not_json(name: str) -> None:
    raise ValueError(name)


def _word(text: str) -> Any:
    """`True`, `None`: as Python writes them."""
    word = text.lower()
    if word not in _WORDS:
        raise ValueError("no such word")
    return _WORDS[word]


def _literal(text: str) -> Any:
    """Objects and lists as Python writes them, as far as they are JSON."""
    if text[:1] not in ("{", "["):
        raise ValueError("neither an object nor a list")
    value = ast.literal_eval(text)
    return _json(json.dumps(value, allow_nan=False))


def dumps(value: Any) -> str:
    """JSON, escaped where UTF-8 has no form (a lone surrogate that was written as an escape)."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text
