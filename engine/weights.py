"""Loads a checkpoint into the arrays that a model computes with (`ModelWeights`).

    headers of all files -> checks (checkpoint) -> arrays (device.empty)
    then the reads of all rows, in the order of the data (tensor_stream) -> rows of the arrays

The host holds the device's staging buffers beside the arrays of the backend itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .checkpoint import check_entries, find_prefix, read_entries
from .config import ModelConfig
from .device import Device
from .json_section import CheckpointError
from .models.weights_layout import ModelWeights
from .progress import Progress
from .safetensors_header import TensorEntry
from .tensor_names import LM_HEAD, PackedArray, Piece, map_arrays, packed_layout
from .tensor_stream import RowRead, RowTarget, TensorFile, stream_rows

Array = Any

_COMPARED_BYTES = 1 << 20
_BF16: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
_HOST_DTYPES: dict[str, np.dtype[Any]] = {"BF16": _BF16, "F32": np.dtype(np.float32)}


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
    map_arrays(layout, packed.append)
    packed = list(dict.fromkeys(packed))  # a tied lm_head is the embedding
    expected = {piece.name: piece.shape for array in packed for piece in array.pieces}
    tied = config.tie_word_embeddings
    check_entries(entries, expected, [LM_HEAD] if tied else [], directory)
    if tied and LM_HEAD in entries:
        _check_tied(entries[layout.embed.pieces[0].name], entries[LM_HEAD])

    def sent_dtype(array: PackedArray, entry: TensorEntry) -> np.dtype[Any]:
        if array.fp32:
            return _HOST_DTYPES["F32"]
        rounded = round_bf16 or act_dtype == "bfloat16"
        return _BF16 if rounded else _HOST_DTYPES[entry.dtype]

    arrays = {
        array: device.empty(array.shape, "float32" if array.fp32 else act_dtype) for array in packed
    }
    jobs = [
        _Job(entries[piece.name], piece, arrays[array], sent_dtype(array, entries[piece.name]))
        for array in packed
        for piece in array.pieces
    ]
    jobs.sort(key=lambda job: (job.entry.file, job.entry.begin))
    total = sum(job.entry.end - job.entry.begin for job in jobs)
    done = 0

    def sent(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress("weights", done, total)

    with closing(device.staging(max(job.row_bytes for job in jobs))) as staging:
        size = len(staging.buffers[0])
        stream_rows([read for job in jobs for read in job.reads(size)], staging, sent)
    weights = map_arrays(layout, arrays.__getitem__)
    assert isinstance(weights, ModelWeights)
    return weights


@dataclass(frozen=True)
class _Job:
    """A tensor of the files, its place in an array of the device, and the type it is sent in."""

    entry: TensorEntry
    piece: Piece
    array: Array
    sent_dtype: np.dtype[Any]

    @property
    def row_bytes(self) -> int:
        columns: tuple[int, ...] = self.array.shape[1:]
        return math.prod(columns) * _HOST_DTYPES[self.entry.dtype].itemsize

    def reads(self, size: int) -> Iterator[RowRead]:
        """The tensor in reads of at most `size` bytes; each has the parts of all row copies."""
        step = size // self.row_bytes
        num_rows = sum(copy.count for copy in self.piece.copies)
        for start in range(0, num_rows, step):
            end = min(start + step, num_rows)
            targets = []
            for copy in self.piece.copies:
                first, last = max(start, copy.source), min(end, copy.source + copy.count)
                if first < last:
                    shift = copy.target - copy.source
                    target = RowTarget(first - start, last - first, self.array, first + shift)
                    targets.append(target)
            yield RowRead(
                self.entry.file,
                self.entry.begin + start * self.row_bytes,
                (end - start, *self.array.shape[1:]),
                _HOST_DTYPES[self.entry.dtype],
                self.sent_dtype,
                tuple(targets),
            )


def _check_tied(embed: TensorEntry, lm_head: TensorEntry) -> None:
    """Tying is a promise that the two are equal; a checkpoint that breaks it has a wrong config."""
    equal = (embed.dtype, embed.shape) == (lm_head.dtype, lm_head.shape)
    if equal:
        a, b = np.empty((2, _COMPARED_BYTES), np.uint8)
        with TensorFile(embed.file) as left, TensorFile(lm_head.file) as right:
            for done in range(0, embed.end - embed.begin, _COMPARED_BYTES):
                count = min(_COMPARED_BYTES, embed.end - embed.begin - done)
                left.read(embed.begin + done, a[:count])
                right.read(lm_head.begin + done, b[:count])
                equal = equal and bool(np.array_equal(a[:count], b[:count]))
    if not equal:
        raise CheckpointError(
            f"{lm_head.file}: tensor {LM_HEAD}: the config ties it to embed_tokens.weight, but the"
            " two differ; set tie_word_embeddings to false if it is meant"
        )
