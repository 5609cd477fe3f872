"""JSON files of a checkpoint, read with errors that name the file, the key and what was found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

MAX_DIM = 1 << 24


class CheckpointError(ValueError):
    """A checkpoint that cannot be served; one line that names the file and what is wrong in it."""


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file, or a CheckpointError that names the file."""
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found {show(value)}")
    return value


class Section:
    """One object of a JSON file; its readers refuse wrong values by file, key and value found.

    A key that is absent or null has its default; without a default it is missing.
    """

    def __init__(self, file: str, prefix: str, values: Mapping[str, Any]) -> None:
        self._file = file
        self._prefix = prefix
        self._values = values

    def get(self, key: str) -> Any:
        return self._values.get(key)

    def refuse(self, key: str, problem: str) -> NoReturn:
        raise CheckpointError(f"{self._file}: {self._prefix}{key}: {problem}")

    def section(self, key: str) -> Section:
        value = self.get(key)
        if not isinstance(value, Mapping):
            self.refuse(key, expected("an object", value))
        return Section(self._file, f"{self._prefix}{key}.", value)

    def integer(self, key: str, default: int | None = None, high: int = MAX_DIM) -> int:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
            self.refuse(key, expected(f"an integer from 1 to {high}", value))
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key)
        value = default if value is None else value
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            self.refuse(key, expected("a positive number", value))
        if not 0 < value < 1e30:  # also false for NaN
            self.refuse(key, expected("a positive number", value))
        return float(value)

    def only(self, key: str, wanted: Any) -> None:
        """Refuses any value but `wanted`, which is also the meaning of an absent key."""
        value = self.get(key)
        if value is not None and (value != wanted or type(value) is not type(wanted)):
            self.refuse(key, f"only {json.dumps(wanted)} can be served, found {show(value)}")

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """An id, a list of ids, or nothing."""
        value = self.get(key)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        for id_ in ids:
            if isinstance(id_, bool) or not isinstance(id_, int) or not 0 <= id_ < vocab_size:
                self.refuse(key, expected(f"token ids below {vocab_size}", value))
        return tuple(ids)


def expected(what: str, found: Any) -> str:
    return f"missing; expected {what}" if found is None else f"expected {what}, got {show(found)}"


def show(value: Any) -> str:
    """A JSON value on one line, cut short."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 120 else text[:117] + "..."
