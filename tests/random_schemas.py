"""Random JSON schemas whose values are short, so that most outputs end before they are cut off."""

from __future__ import annotations

import random
from typing import Any

_PATTERNS = ("^[a-c]{1,4}$", "^(x|yy)-[0-9]{2}$", "^[^a]b?$", "^(foo|bar)+$")
_NAMES = ("a", "b", "name", "größe", 'q"uote', "x y")


def random_schema(rng: random.Random) -> dict[str, Any]:
    """An object or a list at the top, up to three levels, some of it by reference."""
    names = ["s", "o"]
    definitions = {"s": _scalar(rng), "o": _object(rng, 1, ["s"])}
    if rng.random() < 0.3:  # of itself, and it may end anywhere
        definitions["o"]["properties"]["next"] = {"$ref": "#/$defs/o"}
    kind = _object if rng.random() < 0.7 else _array
    compact = {"whitespace_flexible": False, "whitespace_pattern": None}
    options = {"x-guidance": compact} if rng.random() < 0.7 else {}
    return {**kind(rng, 2, names), "$defs": definitions, **options}


def _schema(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    draw = rng.random()
    if draw < 0.15 and names:
        return {"$ref": f"#/$defs/{rng.choice(names)}"}
    if draw < 0.3:
        return {"anyOf": [_scalar(rng), {"type": "null"}]}
    if depth == 0 or draw < 0.6:
        return _scalar(rng)
    return (_object if draw < 0.8 else _array)(rng, depth - 1, names)


def _object(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    keys = rng.sample(_NAMES, rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {key: _schema(rng, depth, names) for key in keys},
        "required": [key for key in keys if rng.random() < 0.6],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int, names: list[str]) -> dict[str, Any]:
    low = rng.randint(0, 2)
    array: dict[str, Any] = {"type": "array", "minItems": low, "maxItems": low + rng.randint(0, 2)}
    if rng.random() < 0.3:
        return {**array, "prefixItems": [_scalar(rng)], "items": _schema(rng, 0, names)}
    return {**array, "items": _schema(rng, depth, names)}


def _scalar(rng: random.Random) -> dict[str, Any]:
    low = rng.randint(-50, 50)
    return rng.choice(
        [
            {"type": "string", "maxLength": rng.randint(1, 8)},
            {"type": "string", "pattern": rng.choice(_PATTERNS)},
            {"type": "string", "format": rng.choice(["date", "ipv4", "uuid"])},
            {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)},
            {"type": "integer", "exclusiveMinimum": low, "exclusiveMaximum": low + 40},
            {"type": "integer", "multipleOf": rng.choice([2, 5, 10]), "minimum": 0, "maximum": 400},
            {"type": "number", "minimum": low, "maximum": low + 0.5},
            {"type": ["boolean", "null"]},
            {"enum": ["red", "grün", 5, None, ["a", 1], {"b": [True]}]},
            {"const": rng.choice([1.5, "<|im_end|>", "</think>", {"k": "v"}, []])},
        ]
    )
