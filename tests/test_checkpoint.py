"""Which checkpoints are refused, by which message; corrupt files never give another error."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from deltaserve.engine.config import ModelConfig
from deltaserve.engine.json_section import CheckpointError
from deltaserve.engine.ops.numpy.device import CpuDevice
from deltaserve.engine.weights import load_weights
from tests.raw_safetensors import join, split
from tests.tiny_checkpoint import text_tensor_shapes, tiny_hf_config, write_checkpoint
from tests.tiny_checkpoint import write_safetensors as write

PREFIX = "model.language_model."
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def refusal(directory: Path) -> str:
    device = CpuDevice()
    with pytest.raises(CheckpointError) as caught:
        load_weights(directory, ModelConfig.from_hf(directory), device, "float32")
    device.close()
    message = str(caught.value)
    assert "\n" not in message
    assert message.encode()  # no lone surrogate: it can be printed
    return message.replace(f"{directory}/", "").replace(str(directory), "DIR")


def change(directory: Path, edit: Callable[[dict[str, np.ndarray]], Any]) -> None:
    tensors = load_file(directory / SINGLE)
    edit(tensors)
    write(directory / SINGLE, tensors)


def change_index(directory: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    index = json.loads((directory / INDEX).read_text())
    edit(index["weight_map"])
    (directory / INDEX).write_text(json.dumps(index))


# ---- tensors -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [n for n in text_tensor_shapes(tiny_hf_config()) if "s.1." not in n]
)
def test_every_tensor_is_needed(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, nested=False)
    full_name = name if name == "lm_head.weight" else f"model.{name}"
    change(tmp_path, lambda tensors: tensors.pop(full_name))
    shape = list(text_tensor_shapes(tiny_hf_config())[name])
    if name == "embed_tokens.weight":
        expected = (
            "DIR: expected tensor model.language_model.embed_tokens.weight or "
            "model.embed_tokens.weight, none among 55 tensors"
        )
    else:
        expected = f"DIR: missing tensor {full_name}; expected BF16 or F32 {shape}"
    assert refusal(tmp_path) == expected


@pytest.mark.parametrize(
    "name", [n for n in text_tensor_shapes(tiny_hf_config()) if "s.1." not in n]
)
def test_every_shape_is_checked(tmp_path: Path, name: str) -> None:
    write_checkpoint(tmp_path, nested=False)
    full_name = name if name == "lm_head.weight" else f"model.{name}"
    shape = text_tensor_shapes(tiny_hf_config())[name]
    wrong = (shape[0] + 1, *shape[1:])
    change(tmp_path, lambda t: t.update({full_name: np.zeros(wrong, np.float32)}))
    assert refusal(tmp_path) == (
        f"model.safetensors: tensor {full_name}: expected BF16 or F32 {list(shape)}, "
        f"found F32 {list(wrong)}"
    )


def test_transposed_matrix_is_no_match(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    name = f"{PREFIX}layers.0.mlp.down_proj.weight"
    change(tmp_path, lambda t: t.update({name: np.ascontiguousarray(t[name].T)}))
    assert refusal(tmp_path).endswith("expected BF16 or F32 [64, 96], found BF16 [96, 64]")


@pytest.mark.parametrize(
    ("dtype", "label"),
    [
        (np.float16, "F16"),
        (np.float64, "F64"),
        (np.int8, "I8"),
        (ml_dtypes.float8_e4m3fn, "F8_E4M3"),
    ],
)
@pytest.mark.parametrize("name", ["layers.0.linear_attn.A_log", "layers.1.mlp.up_proj.weight"])
def test_other_dtypes_are_named(tmp_path: Path, name: str, dtype: Any, label: str) -> None:
    write_checkpoint(tmp_path)
    change(tmp_path, lambda t: t.update({PREFIX + name: t[PREFIX + name].astype(dtype)}))
    assert refusal(tmp_path).endswith(f", found {label} {list(text_shape(name))}")


def text_shape(name: str) -> tuple[int, ...]:
    return text_tensor_shapes(tiny_hf_config())[name]


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["model.language_model.layers.4.input_layernorm.weight"], ""),
        (["model.language_model.layers.0.mlp.up_proj.weight_scale_inv"], ""),
        (["model.layers.0.mlp.up_proj.weight", "other"], " and 1 more"),
        (["lm_head.bias"], ""),
        (["line\nbreak \ud800"], ""),
    ],
)
def test_unexpected_tensors_are_named(tmp_path: Path, names: list[str], text: str) -> None:
    write_checkpoint(tmp_path)
    add_raw_tensors(tmp_path / SINGLE, names)
    assert refusal(tmp_path) == (
        f"model.safetensors: unexpected tensor {json.dumps(names[0])}{text}, F32 [3]; the config "
        "describes a model without it"
    )


def add_raw_tensors(path: Path, names: list[str]) -> None:
    """Appends F32 [3] tensors, of names that the library would not write."""
    header, data = split(path.read_bytes())
    for name in names:
        header[name] = {"dtype": "F32", "shape": [3], "data_offsets": [len(data), len(data) + 12]}
        data += bytes(12)
    path.write_bytes(join(header, data))


def test_a_model_with_more_layers_than_its_config_says(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, num_hidden_layers=5)
    (tmp_path / "config.json").write_text(json.dumps(tiny_hf_config()))
    assert refusal(tmp_path).startswith(
        f'model.safetensors: unexpected tensor "{PREFIX}layers.4.linear_attn.A_log" and 13 more'
    )


def test_a_model_with_fewer_layers_than_its_config_says(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(tiny_hf_config(num_hidden_layers=5)))
    assert refusal(tmp_path).startswith(
        f"DIR: missing tensor {PREFIX}layers.4.input_layernorm.weight and 13 more; expected "
    )


def test_both_prefixes_at_once(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    change(tmp_path, lambda t: t.update({"model.embed_tokens.weight": np.zeros((2, 2))}))
    assert refusal(tmp_path).endswith("both are there")


# ---- files and index ---------------------------------------------------------------------------


def test_no_directory(tmp_path: Path) -> None:
    config, device = ModelConfig.from_hf(tiny_hf_config()), CpuDevice()
    with pytest.raises(CheckpointError, match="nowhere: no such directory"):
        load_weights(tmp_path / "nowhere", config, device, "float32")
    device.close()


def test_no_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_hf_config()))
    assert refusal(tmp_path) == f"DIR: neither {SINGLE} nor {INDEX} there"


def test_shards_without_an_index(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=2)
    (tmp_path / INDEX).unlink()
    assert refusal(tmp_path) == (
        f"DIR: neither {SINGLE} nor {INDEX} there, "
        'only "model-00001-of-00002.safetensors" and 1 more'
    )


def test_missing_shard(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=3)
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    message = refusal(tmp_path)
    assert message.startswith(f"model-00002-of-00003.safetensors: missing shard; {INDEX} places ")


def test_index_entry_that_its_shard_lacks(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=2)
    name = f"{PREFIX}layers.0.extra.weight"
    change_index(tmp_path, lambda m: m.update({name: "model-00002-of-00002.safetensors"}))
    assert refusal(tmp_path) == (
        f'model-00002-of-00002.safetensors: lacks tensor "{name}", which {INDEX} places in it'
    )


def test_tensor_that_the_index_places_elsewhere(tmp_path: Path) -> None:
    """So that no tensor can come from two shards."""
    write_checkpoint(tmp_path, shards=2)
    name = f"{PREFIX}embed_tokens.weight"
    second = tmp_path / "model-00002-of-00002.safetensors"
    write(second, {**load_file(second), name: np.zeros((320, 64), np.float32)})
    assert refusal(tmp_path) == (
        f'model-00002-of-00002.safetensors: holds "{name}", but {INDEX} places it in '
        "model-00001-of-00002.safetensors"
    )


def test_tensor_that_the_index_does_not_list(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, shards=2)
    change_index(tmp_path, lambda m: m.pop("lm_head.weight"))
    assert refusal(tmp_path).endswith(f'holds "lm_head.weight", but {INDEX} does not list it')


@pytest.mark.parametrize(
    "file",
    [
        "../model.safetensors",
        "/etc/x.safetensors",
        "sub/x.safetensors",
        "..\\x.safetensors",
        ".safetensors/",
        "model.bin",
        "",
        "x\0.safetensors",
        "x\n.safetensors",
        "\ud800.safetensors",
        "x" * 300 + ".safetensors",
        None,
        3,
        ["model.safetensors"],
    ],
)
def test_index_names_files_beside_it_alone(tmp_path: Path, file: Any) -> None:
    write_checkpoint(tmp_path / "model", shards=2)
    write_checkpoint(tmp_path)
    change_index(tmp_path / "model", lambda m: m.update({"lm_head.weight": file}))
    assert refusal(tmp_path / "model").startswith(
        f'{INDEX}: "lm_head.weight": expected the name of a .safetensors file beside the index, '
    )


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_index_without_a_weight_map(tmp_path: Path, content: str) -> None:
    write_checkpoint(tmp_path, shards=2)
    (tmp_path / INDEX).write_text(content)
    assert refusal(tmp_path).startswith(f"{INDEX}: ")


def test_a_directory_in_place_of_a_file(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    (tmp_path / SINGLE).unlink()
    (tmp_path / SINGLE).mkdir()
    assert refusal(tmp_path) == f"{SINGLE}: cannot be read: Is a directory"


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("kept", [0, 5, 100, 0.5, -1])
def test_truncated_checkpoints(tmp_path: Path, shards: int, kept: float) -> None:
    write_checkpoint(tmp_path, shards=shards)
    path = sorted(tmp_path.glob("*.safetensors"))[-1]
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content)) if kept == 0.5 else int(kept)])
    message = refusal(tmp_path)
    assert message.startswith(f"{path.name}: ")
    assert "truncated" in message or "not a safetensors file" in message
