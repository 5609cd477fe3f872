"""The header reader: every kind of corruption is a CheckpointError, and nothing else is."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deltaserve.engine.config import ModelConfig
from deltaserve.engine.json_section import CheckpointError
from deltaserve.engine.ops.numpy.device import CpuDevice
from deltaserve.engine.safetensors_header import read_header
from deltaserve.engine.weights import load_weights
from tests.raw_safetensors import join, split
from tests.tiny_checkpoint import tiny_hf_config, write_checkpoint, write_safetensors

TENSOR = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not a safetensors file: 0 bytes"),
        (b"1234567", "not a safetensors file: 7 bytes"),
        (b"<!DOCTYPE html><html>", "not a safetensors file: its header would take "),
        (b"\xff" * 100, "not a safetensors file: its header would take "),
        (struct.pack("<Q", 1000) + b"{}", "truncated: a header of 1000 bytes in a file of 10"),
        (join(b"", b""), "corrupt header: "),
        (join(b"{", b""), "corrupt header: "),
        (join(b"\xff{}", b""), "corrupt header: "),
        (join(b"[" * 5000, b""), "corrupt header: "),
        (join([], b""), "corrupt header: expected a JSON object, found []"),
        (join(b'{"a": {}, "a": {}}', b""), 'corrupt header: "a" appears twice'),
        (join({"a": []}, b""), 'corrupt header: tensor "a": expected an object, found []'),
        (join({"a": {}}, b""), 'corrupt header: tensor "a": unknown dtype null'),
        (
            join({"a": {**TENSOR, "dtype": "F128"}}, bytes(8)),
            'corrupt header: tensor "a": unknown ',
        ),
        (join({"a": {**TENSOR, "dtype": ["F32"]}}, bytes(8)), 'corrupt header: tensor "a": unknow'),
        (join({"a": {**TENSOR, "shape": 2}}, bytes(8)), 'corrupt header: tensor "a": not a shape'),
        (
            join({"a": {**TENSOR, "shape": [-2]}}, bytes(8)),
            'corrupt header: tensor "a": not a shap',
        ),
        (join({"a": {**TENSOR, "shape": [2.0]}}, bytes(8)), 'corrupt header: tensor "a": not a sh'),
        (join({"a": {**TENSOR, "shape": [True, 2]}}, bytes(8)), 'corrupt header: tensor "a": not '),
        (join({"a": {**TENSOR, "shape": [1] * 9}}, bytes(8)), 'corrupt header: tensor "a": not a '),
        (join({"a": {**TENSOR, "shape": [1 << 70]}}, bytes(8)), 'corrupt header: tensor "a": not '),
        (
            join({"a": {**TENSOR, "shape": [3]}}, bytes(8)),
            'corrupt header: tensor "a": F32 [3] takes 12 bytes, not 8',
        ),
        (
            join({"a": {**TENSOR, "dtype": "F4", "shape": [3]}}, bytes(8)),
            'corrupt header: tensor "a": F4 [3] takes 1.5 bytes, not 8',
        ),
        (
            join({"a": {**TENSOR, "data_offsets": [8, 0]}}, bytes(8)),
            'corrupt header: tensor "a": F32 [2] takes 8 bytes, not -8',
        ),
        (
            join({"a": {**TENSOR, "data_offsets": [0]}}, bytes(8)),
            'corrupt header: tensor "a": not a pair of offsets: [0]',
        ),
        (
            join({"a": {**TENSOR, "data_offsets": [-8, 0]}}, bytes(8)),
            'corrupt header: tensor "a": not a pair of offsets: [-8, 0]',
        ),
        (
            join({"a": {**TENSOR, "data_offsets": [8, 16]}}, bytes(16)),
            'corrupt header: tensor "a" leaves a gap before it',
        ),
        (
            join({"a": TENSOR, "b": {**TENSOR, "data_offsets": [4, 12]}}, bytes(12)),
            'corrupt header: tensor "b" overlaps the tensor before it',
        ),
        (join({"a": TENSOR, "b": TENSOR}, bytes(8)), 'corrupt header: tensor "b" overlaps the te'),
        (join({"a": TENSOR}, bytes(7)), "truncated: its tensors end at byte "),
        (join({"a": TENSOR}, bytes(9)), "corrupt: 1 bytes follow the last tensor"),
    ],
)
def test_corrupt_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_headers_are_read_as_the_library_writes_them(tmp_path: Path) -> None:
    dtypes = [np.bool_, np.int8, np.uint16, np.float16, np.int32, np.float32, np.int64, np.float64]
    tensors = {f"t{i}": np.ones((i, 3), dtype) for i, dtype in enumerate(dtypes)}
    tensors["scalar"] = np.array(2.5, np.float32)
    path = tmp_path / "x.safetensors"
    write_safetensors(path, tensors)
    content = path.read_bytes()
    entries = read_header(path)
    assert entries.keys() == tensors.keys()
    for name, entry in entries.items():
        assert entry.shape == tensors[name].shape
        assert content[entry.begin : entry.end] == tensors[name].tobytes()


def loads_or_is_refused(path: Path) -> None:
    device = CpuDevice()
    try:
        load_weights(path, ModelConfig.from_hf(TINIEST), device, "float32")
    except CheckpointError as error:
        assert "\n" not in str(error)
        assert str(error).encode()
    finally:
        device.close()


TINIEST = tiny_hf_config(
    hidden_size=2,
    intermediate_size=1,
    num_hidden_layers=1,
    layer_types=["full_attention"],
    num_attention_heads=1,
    num_key_value_heads=1,
    head_dim=8,
    vocab_size=2,
    eos_token_id=1,
)


@pytest.fixture(scope="module")
def tiniest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiniest")
    write_checkpoint(directory, **TINIEST)
    return directory


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_bytes_changed_anywhere(tiniest: Path, data: st.DataObject) -> None:
    """Of the header and its length; the values of weights cannot be wrong."""
    path = tiniest / "model.safetensors"
    content = path.read_bytes()
    length = 8 + struct.unpack("<Q", content[:8])[0]
    changed = bytearray(content)
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, length - 1))
        end = data.draw(st.integers(start, min(start + 4, length)))
        changed[start:end] = data.draw(st.binary(max_size=4) | st.sampled_from(HOSTILE))
    try:
        path.write_bytes(changed)
        loads_or_is_refused(tiniest)
    finally:
        path.write_bytes(content)


HOSTILE = [
    b'"',
    b"{",
    b"}",
    b"[",
    b"]",
    b",",
    b":",
    b"-",
    b"0",
    b"1e9",
    b"null",
    b"\\ud800",
    b"NaN",
]
VALUES = st.sampled_from([None, True, -1, 0, 1, 2, 8, 16, 1 << 63, 1.5, "", "F32", "BF16", [], {}])


@settings(deadline=None, max_examples=150)
@given(
    edits=st.lists(
        st.tuples(
            st.integers(0, 12),
            st.sampled_from(["dtype", "shape", "data_offsets", "all"]),
            VALUES | st.lists(VALUES, max_size=3),
        ),
        min_size=1,
        max_size=3,
    )
)
@example(edits=[(0, "all", None)])
def test_header_values_changed_anywhere(tiniest: Path, edits: list[tuple[int, str, Any]]) -> None:
    path = tiniest / "model.safetensors"
    content = path.read_bytes()
    header, data = split(content)
    names = list(header)
    for position, key, value in edits:
        name = names[position % len(names)]
        if key == "all" or not isinstance(header[name], dict):
            header[name] = value
        else:
            header[name] = {**header[name], key: value}
    try:
        path.write_bytes(join(header, data))
        loads_or_is_refused(tiniest)
    finally:
        path.write_bytes(content)
