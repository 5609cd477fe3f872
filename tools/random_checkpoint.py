"""Writes a checkpoint of random bits in a size's true shapes, fast, for timing the loader.

Values are finite bf16 (and fp32 for A_log and the gated norm) and mean nothing. All data is one
random block over and over, whose length shares no factor with any row, so that no two rows of a
tensor are equal and a row in the wrong place shows.
"""

from __future__ import annotations

import json
import math
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deltaserve.engine.config import ModelConfig
from deltaserve.engine.tensor_names import PackedArray, map_arrays, packed_layout

SHARD_BYTES = 5 << 30
_BLOCK_VALUES = (1 << 23) - 15  # prime
_WRITE_VALUES = 1 << 22


def checkpoint_bytes(hf_config: dict[str, Any]) -> int:
    return sum(_num_bytes(*tensor) for tensor in _tensors(hf_config))


def write_random_checkpoint(directory: Path, hf_config: dict[str, Any], threads: int) -> None:
    """config.json, shards of up to SHARD_BYTES and their index."""
    (directory / "config.json").write_text(json.dumps(hf_config))
    shards: list[list[tuple[str, str, tuple[int, ...]]]] = [[]]
    size = 0
    for tensor in _tensors(hf_config):
        if size and size + _num_bytes(*tensor) > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += _num_bytes(*tensor)
    bits = np.random.default_rng(0).integers(0, 1 << 16, _BLOCK_VALUES, np.uint16)
    bits &= 0xBFFF  # no exponent of infinity or NaN, in bf16 and in fp32
    ring = np.concatenate((bits, bits[:_WRITE_VALUES]))
    weight_map: dict[str, str] = {}
    with ThreadPoolExecutor(threads) as pool:
        for i, shard in enumerate(shards):
            name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
            weight_map |= {tensor: name for tensor, _, _ in shard}
            _write_shard(directory / name, shard, ring, pool)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def _tensors(hf_config: dict[str, Any]) -> list[tuple[str, str, tuple[int, ...]]]:
    """(name, dtype, shape), in the order of the files."""
    arrays: list[PackedArray] = []
    map_arrays(packed_layout(ModelConfig.from_hf(hf_config), "model."), arrays.append)
    fp32 = ("A_log", "linear_attn.norm.weight")
    return [
        (piece.name, "F32" if piece.name.endswith(fp32) else "BF16", piece.shape)
        for array in dict.fromkeys(arrays)
        for piece in array.pieces
    ]


def _num_bytes(_: str, dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * (4 if dtype == "F32" else 2)


def _write_shard(
    path: Path,
    tensors: list[tuple[str, str, tuple[int, ...]]],
    ring: npt.NDArray[np.uint16],
    pool: ThreadPoolExecutor,
) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, dtype, shape in tensors:
        begin, end = end, end + _num_bytes(name, dtype, shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        os.pwrite(file, struct.pack("<Q", len(text)) + text, 0)

        def write(start: int) -> None:
            count = min(_WRITE_VALUES, end // 2 - start)
            first = start % _BLOCK_VALUES
            data = ring[first : first + count].view(np.uint8).data
            done = 0
            while done < len(data):
                done += os.pwrite(file, data[done:], 8 + len(text) + 2 * start + done)

        list(pool.map(write, range(0, end // 2, _WRITE_VALUES)))
    finally:
        os.close(file)
