"""Typed JSON bodies: bytes -> one struct, or a 400 that names the field.

A body may be megabytes of anything, and a decoder holds the GIL while it works. So a body is first
cut into its fields, which builds nothing, then each field is decoded as its own type and within a
limit. Fields of type `msgspec.Raw` stay as they are, for who knows how to read them in pieces.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import msgspec

from .errors import ApiError

MAX_FIELD_BYTES = 1 << 20
_RAW = (msgspec.Raw, msgspec.Raw | None)

T = TypeVar("T", bound=msgspec.Struct)


class BodyParser(Generic[T]):
    """Reads bodies of one struct type. Null means absent; a field without a default is required;
    what the struct does not list is refused. `max_bytes`: of fields that may be long."""

    def __init__(self, kind: type[T], max_bytes: Mapping[str, int] | None = None) -> None:
        self._kind = kind
        self._max_bytes = dict(max_bytes or {})
        fields = msgspec.structs.fields(kind)
        self._required = [field.name for field in fields if field.required]
        self._decoders: dict[str, msgspec.json.Decoder[Any] | None] = {
            field.name: None if field.type in _RAW else msgspec.json.Decoder(field.type)
            for field in fields
        }
        envelope = msgspec.defstruct(
            kind.__name__,
            [(field.name, msgspec.Raw, msgspec.Raw()) for field in fields],
            forbid_unknown_fields=True,
        )
        self._envelope: msgspec.json.Decoder[Any] = msgspec.json.Decoder(envelope)

    def parse(self, body: bytes) -> T:
        """Raises ApiError 400."""
        envelope = _decode(self._envelope, body, body)
        values: dict[str, Any] = {}
        for name, decoder in self._decoders.items():
            raw = getattr(envelope, name)
            if len(memoryview(raw)) == 0 or raw == msgspec.Raw(b"null"):
                continue
            if decoder is None:
                values[name] = raw
                continue
            limit = self._max_bytes.get(name, MAX_FIELD_BYTES)
            if len(memoryview(raw)) > limit:
                raise invalid(name, f"{name}: is longer than {limit} bytes")
            values[name] = decode_field(decoder, raw, name)
        for name in self._required:
            if name not in values:
                raise invalid(name, f"{name}: is required")
        return self._kind(**values)


def decode_field(decoder: msgspec.json.Decoder[Any], raw: bytes | msgspec.Raw, name: str) -> Any:
    """One field's value. Raises ApiError 400 that names it."""
    try:
        return decoder.decode(raw)
    except msgspec.ValidationError as error:
        problem, _, place = str(error).partition(" - at `")
        key = "a key " if place.startswith("key` in") else ""
        path = place.rpartition("$")[2].rstrip("`")
        raise invalid(name, f"{name}{path}: {key}{_in_words(problem)}") from None
    except RecursionError:
        raise invalid(name, f"{name}: is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise invalid(name, f"{name}: is not valid JSON: {_why(bytes(raw), str(error))}") from None


def invalid(param: str, message: str) -> ApiError:
    return ApiError(400, message, param[:100])


def _decode(decoder: msgspec.json.Decoder[Any], data: bytes, body: bytes) -> Any:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        unknown = re.search(r"unknown field `(.*)`$", str(error), re.DOTALL)
        if unknown is not None:
            name = unknown[1]
            raise invalid(name, f"unknown field {name[:100]!r}") from None
        raise ApiError(400, "the body must be a JSON object") from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ApiError(400, f"the body is not valid JSON: {_why(body, str(error))}") from None


def _in_words(problem: str) -> str:
    """msgspec's finding, in the words of our other messages."""
    match = re.fullmatch(r"Expected `(.*)`, got `(.*)`", problem)
    if match is None:
        return problem[:1].lower() + problem[1:]
    wanted = [name for name in match[1].split(" | ") if name != "null"]
    return f"must be {' or '.join(_NAMES.get(name, name) for name in wanted)}, got {match[2]}"


_NAMES = {
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "str": "a string",
    "array": "a list",
    "object": "an object",
}


def _why(body: bytes, message: str) -> str:
    if "surrogate" in message or re.search(
        rb"\\u[dD][89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])", body
    ):
        return "a string holds a lone surrogate"
    if re.search(rb"[:\[,]\s*-?(NaN|Infinity)\b", body):
        return "NaN and Infinity are not numbers in JSON"
    return message
