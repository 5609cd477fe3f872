"""The header of a safetensors file: what it holds and where, checked against the file's size.

    8 bytes   n, little endian
    n bytes   JSON: {"name": {"dtype": "BF16", "shape": [..], "data_offsets": [begin, end]}, ...}
    the rest  the tensors' bytes; offsets count from here, without gap or overlap

Reads no tensor. Anything wrong is a CheckpointError that names the file.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from .json_section import CheckpointError, show

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_MAX_RANK = 8
_MAX_DIM = 1 << 40
_BITS = {
    **dict.fromkeys(("F4",), 4),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


@dataclass(frozen=True)
class TensorEntry:
    """A tensor in a file; bytes `begin` to `end` of the file, row-major."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


def read_header(path: Path) -> dict[str, TensorEntry]:
    """name -> entry of every tensor in the file, in the order of their data."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8:
                _refuse(path, f"not a safetensors file: {size} bytes")
            if length > MAX_HEADER_BYTES:
                _refuse(path, f"not a safetensors file: its header would take {length} bytes")
            if length > size - 8:
                _refuse(path, f"truncated: a header of {length} bytes in a file of {size}")
            header = file.read(length)
    except FileNotFoundError:
        _refuse(path, "no such file")
    except OSError as error:
        _refuse(path, f"cannot be read: {error.strerror}")
    entries = _parse_header(path, header, 8 + length)
    _check_layout(path, entries, 8 + length, size)
    return entries


def _parse_header(path: Path, header: bytes, data_start: int) -> dict[str, TensorEntry]:
    try:
        values = json.loads(header.decode(), object_pairs_hook=_object_of_unique_keys)
    except (ValueError, RecursionError) as error:
        _refuse(path, f"corrupt header: {error}")
    if not isinstance(values, dict):
        _refuse(path, f"corrupt header: expected a JSON object, found {show(values)}")
    entries = {
        name: _parse_entry(path, name, value, data_start)
        for name, value in values.items()
        if name != "__metadata__"
    }
    return dict(sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)))


def _object_of_unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"{show(key)} appears twice")
            seen.add(key)
    return values


def _parse_entry(path: Path, name: str, value: Any, data_start: int) -> TensorEntry:
    where = f"corrupt header: tensor {show(name)}"
    if not isinstance(value, dict):
        _refuse(path, f"{where}: expected an object, found {show(value)}")
    dtype: Any = value.get("dtype")
    shape: Any = value.get("shape")
    offsets: Any = value.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in _BITS:
        _refuse(path, f"{where}: unknown dtype {show(dtype)}")
    if not _is_list_of_sizes(shape) or len(shape) > _MAX_RANK:
        _refuse(path, f"{where}: not a shape: {show(shape)}")
    if not _is_list_of_sizes(offsets) or len(offsets) != 2:
        _refuse(path, f"{where}: not a pair of offsets: {show(offsets)}")
    begin, end = offsets
    bits = math.prod(shape) * _BITS[dtype]
    if bits % 8 or end - begin != bits // 8:
        _refuse(path, f"{where}: {dtype} {shape} takes {bits / 8:g} bytes, not {end - begin}")
    return TensorEntry(path, dtype, tuple(shape), data_start + begin, data_start + end)


def _is_list_of_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= _MAX_DIM for n in value
    )


def _check_layout(
    path: Path, entries: dict[str, TensorEntry], data_start: int, file_size: int
) -> None:
    """The tensors lie one behind the other and end with the file."""
    end = data_start
    for name, entry in entries.items():
        if entry.begin != end:
            how = "overlaps the tensor before it" if entry.begin < end else "leaves a gap before it"
            _refuse(path, f"corrupt header: tensor {show(name)} {how}")
        end = entry.end
    if end > file_size:
        _refuse(path, f"truncated: its tensors end at byte {end}, the file at {file_size}")
    if end < file_size:
        _refuse(path, f"corrupt: {file_size - end} bytes follow the last tensor")


def _refuse(path: Path, problem: str) -> NoReturn:
    raise CheckpointError(f"{path}: {problem}")
