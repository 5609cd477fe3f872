"""Loads a checkpoint into the arrays that a model computes with (`ModelWeights`).

    headers of all files -> checks (checkpoint) -> arrays (device.empty)
    then file by file, in the order of the data: read some rows -> device.write_rows

The host holds `STAGING_BYTES` of the data at a time, beside the arrays of the backend itself.
Reads are plain reads: a file that shrinks meanwhile is an error, where a mapping would be a crash.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .checkpoint import check_entries, find_prefix, read_entries
from .config import ModelConfig
from .device import Device
from .json_section import CheckpointError
from .models.weights_layout import ModelWeights
from .progress import Progress
from .safetensors_header import TensorEntry
from .tensor_names import LM_HEAD, PackedArray, Piece, RowCopy, packed_layout

STAGING_BYTES = 8 << 20
Array = Any

_BF16 = np.dtype(ml_dtypes.bfloat16)
_HOST_DTYPES = {"BF16": _BF16, "F32": np.dtype(np.float32)}


def load_weights(
    model_dir: str | Path,
    config: ModelConfig,
    device: Device,
    act_dtype: str,
    *,
    round_bf16: bool = False,
    progress: Progress | None = None,
) -> ModelWeights:
    """The packed weights on `device`.

    Arrays have `act_dtype` ("float32", "bfloat16"), those that the layout says are fp32 excepted.
    `round_bf16` rounds F32 tensors to bf16 values on their way into float32 arrays, which is what
    bfloat16 arrays do to them anyway. A tied model may come with an lm_head that
    equals its embedding. Raises CheckpointError; all headers are checked before any data is read.
    """
    directory = Path(model_dir)
    entries = read_entries(directory)
    layout = packed_layout(config, find_prefix(entries, directory))
    packed: list[PackedArray] = []
    _map_leaves(layout, packed.append)
    packed = list(dict.fromkeys(packed))  # a tied lm_head is the embedding
    expected = {piece.name: piece.shape for array in packed for piece in array.pieces}
    tied = config.tie_word_embeddings
    check_entries(entries, expected, [LM_HEAD] if tied else [], directory)
    if tied and LM_HEAD in entries:
        _check_tied(entries[layout.embed.pieces[0].name], entries[LM_HEAD])

    arrays: dict[PackedArray, Array] = {}
    jobs: list[tuple[TensorEntry, Piece, PackedArray]] = []
    for array in packed:
        arrays[array] = device.empty(array.shape, "float32" if array.fp32 else act_dtype)
        jobs += [(entries[piece.name], piece, array) for piece in array.pieces]
    jobs.sort(key=lambda job: (job[0].file, job[0].begin))
    total = sum(entry.end - entry.begin for entry, _, _ in jobs)
    done = 0
    for path, file_jobs in itertools.groupby(jobs, key=lambda job: job[0].file):
        with _TensorFile(path) as file:
            for entry, piece, array in file_jobs:
                target = arrays[array]
                rounded = not array.fp32 and (round_bf16 or act_dtype == "bfloat16")
                host_dtype = _BF16 if rounded else np.float32 if array.fp32 else None
                for first_row, rows in file.rows(entry, piece.copies, array.shape[1:]):
                    host = rows if host_dtype is None else rows.astype(host_dtype, copy=False)
                    device.write_rows(host, target, first_row)
                    done += rows.nbytes
                    if progress is not None:
                        progress("weights", done, total)
    weights = _map_leaves(layout, arrays.__getitem__)
    assert isinstance(weights, ModelWeights)
    return weights


def _map_leaves(tree: Any, leaf: Callable[[PackedArray], Any]) -> Any:
    """The same dataclasses and tuples with `leaf(array)` in the place of each PackedArray."""
    if isinstance(tree, PackedArray):
        return leaf(tree)
    if isinstance(tree, tuple):
        return tuple(_map_leaves(item, leaf) for item in tree)
    values = {f.name: _map_leaves(getattr(tree, f.name), leaf) for f in dataclasses.fields(tree)}
    return type(tree)(**values)


def _check_tied(embed: TensorEntry, lm_head: TensorEntry) -> None:
    """Tying is a promise that the two are equal; a checkpoint that breaks it has a wrong config."""
    equal = (embed.dtype, embed.shape) == (lm_head.dtype, lm_head.shape)
    if equal:
        rows, columns = embed.shape
        copies = (RowCopy(0, 0, rows),)
        with _TensorFile(embed.file) as left, _TensorFile(lm_head.file) as right:
            for (_, a), (_, b) in zip(
                left.rows(embed, copies, (columns,)),
                right.rows(lm_head, copies, (columns,)),
                strict=True,
            ):
                equal = equal and a.tobytes() == b.tobytes()
    if not equal:
        raise CheckpointError(
            f"{lm_head.file}: tensor {LM_HEAD}: the config ties it to embed_tokens.weight, but the"
            " two differ; set tie_word_embeddings to false if it is meant"
        )


class _TensorFile:
    """An open file of tensors and the buffer that they are read through."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._staging = np.empty(STAGING_BYTES, np.uint8)
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from error

    def __enter__(self) -> _TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def rows(
        self, entry: TensorEntry, copies: tuple[RowCopy, ...], columns: tuple[int, ...]
    ) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """(first row in the target, rows [n, *columns]); the next rows overwrite these."""
        dtype = _HOST_DTYPES[entry.dtype]
        row_bytes = math.prod(columns) * dtype.itemsize
        step = max(1, STAGING_BYTES // row_bytes)
        for copy in copies:
            for start in range(0, copy.count, step):
                count = min(step, copy.count - start)
                offset = entry.begin + (copy.source + start) * row_bytes
                data = self._read(offset, count * row_bytes)
                yield copy.target + start, data.view(dtype).reshape(count, *columns)

    def _read(self, offset: int, size: int) -> npt.NDArray[np.uint8]:
        if size > len(self._staging):  # one row of a very wide matrix
            self._staging = np.empty(size, np.uint8)
        part = self._staging[:size]
        done = 0
        while done < size:
            try:
                count = os.preadv(self._file, [part[done:].data], offset + done)
            except OSError as error:
                raise CheckpointError(f"{self._path}: cannot be read: {error.strerror}") from error
            if count == 0:
                raise CheckpointError(f"{self._path}: shrank while it was read")
            done += count
        return part
