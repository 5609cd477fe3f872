"""Loading: what lands where, from which file layouts, and the memory it takes."""

from __future__ import annotations

import json
import os
import threading
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from deltaserve.engine.config import ModelConfig
from deltaserve.engine.json_section import CheckpointError
from deltaserve.engine.models.weights_layout import ModelWeights
from deltaserve.engine.ops.numpy import device as device_module
from deltaserve.engine.ops.numpy.device import STAGING_BYTES, CpuDevice
from deltaserve.engine.weights import load_weights
from tests.slow_packing import assert_equal_weights, flatten, read_tensors, slow_packing
from tests.tiny_checkpoint import tiny_hf_config, write_checkpoint, write_safetensors


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    cpu = CpuDevice()
    yield cpu
    cpu.close()


def load(directory: Path, device: CpuDevice, **options: Any) -> ModelWeights:
    return load_weights(directory, ModelConfig.from_hf(directory), device, "float32", **options)


# ---- what lands where --------------------------------------------------------------------------

small = st.integers(1, 3)
CONFIGS = st.fixed_dictionaries(
    {
        "hidden_size": st.integers(1, 9),
        "intermediate_size": st.integers(1, 9),
        "heads": st.tuples(small, small),
        "head_dim": st.sampled_from([8, 16]),
        "linear_heads": st.tuples(small, small),
        "linear_key_head_dim": st.integers(1, 5),
        "linear_value_head_dim": st.integers(1, 5),
        "tie_word_embeddings": st.booleans(),
        "layer_types": st.lists(
            st.sampled_from(["linear_attention", "full_attention"]), min_size=1, max_size=3
        ),
    }
)
LAYOUTS = st.fixed_dictionaries(
    {
        "nested": st.booleans(),
        "prefix": st.sampled_from([None, "model.", "model.language_model."]),
        "dtype": st.sampled_from(["bfloat16", "float32"]),
        "fp32_extras": st.booleans(),
        "extra_tensors": st.booleans(),
        "shards": st.integers(1, 4),
    }
)


@settings(deadline=None, max_examples=40)
@given(dims=CONFIGS, layout=LAYOUTS, staging=st.sampled_from([1, 100, 1000, STAGING_BYTES]))
def test_packing_equals_a_slow_one(
    tmp_path_factory: pytest.TempPathFactory,
    dims: dict[str, Any],
    layout: dict[str, Any],
    staging: int,
) -> None:
    directory = tmp_path_factory.mktemp("checkpoint")
    kv_heads, group = dims.pop("heads")
    key_heads, repeat = dims.pop("linear_heads")
    dims |= {
        "num_hidden_layers": len(dims["layer_types"]),
        "num_key_value_heads": kv_heads,
        "num_attention_heads": kv_heads * group,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * repeat,
        "vocab_size": 300,
    }
    write_checkpoint(directory, **layout, **dims)
    device = CpuDevice()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_module, "STAGING_BYTES", staging)
        found = flatten(load(directory, device))
    device.close()
    assert_equal_weights(found, slow_packing(read_tensors(directory), tiny_hf_config(**dims)))


def test_sharded_equals_single(tmp_path: Path, device: CpuDevice) -> None:
    write_checkpoint(tmp_path / "single", seed=5)
    write_checkpoint(tmp_path / "sharded", seed=5, shards=4, nested=False)
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) == 4
    assert_equal_weights(
        flatten(load(tmp_path / "sharded", device)), flatten(load(tmp_path / "single", device))
    )


def test_a_single_file_wins_over_an_index(tmp_path: Path, device: CpuDevice) -> None:
    write_checkpoint(tmp_path, seed=5)
    (tmp_path / "model.safetensors.index.json").write_text("stale")
    load(tmp_path, device)


def test_tied_head_is_the_embedding_itself(tmp_path: Path, device: CpuDevice) -> None:
    write_checkpoint(tmp_path / "tied", tie_word_embeddings=True)
    weights = load(tmp_path / "tied", device)
    assert weights.lm_head is weights.embed
    write_checkpoint(tmp_path / "untied", tie_word_embeddings=False)
    weights = load(tmp_path / "untied", device)
    assert not np.array_equal(weights.lm_head, weights.embed)


def write_tied_with_head(directory: Path, change: bool) -> None:
    write_checkpoint(directory, tie_word_embeddings=True)
    tensors = load_file(directory / "model.safetensors")
    head = tensors["model.language_model.embed_tokens.weight"].copy()
    head[-1, -1] += change
    write_safetensors(directory / "model.safetensors", {**tensors, "lm_head.weight": head})


def test_tied_head_may_be_stored_if_it_equals_the_embedding(
    tmp_path: Path, device: CpuDevice
) -> None:
    write_tied_with_head(tmp_path, change=False)
    weights = load(tmp_path, device)
    assert weights.lm_head is weights.embed


def test_tied_head_that_differs_is_refused(tmp_path: Path, device: CpuDevice) -> None:
    write_tied_with_head(tmp_path, change=True)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: the config ties it .* differ"):
        load(tmp_path, device)


def test_bf16_rounding_of_fp32_weights(tmp_path: Path, device: CpuDevice) -> None:
    write_checkpoint(tmp_path, dtype="float32")
    plain, rounded = (
        flatten(load(tmp_path, device)),
        flatten(load(tmp_path, device, round_bf16=True)),
    )
    for name, value in plain.items():
        keeps = name.endswith(("mixer.a_log", "mixer.dt_bias")) or (
            name.endswith("mixer.norm") and len(value) == 24
        )
        expected = value if keeps else value.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(rounded[name], expected, err_msg=name)
    assert not np.array_equal(plain["embed"], rounded["embed"])


class Bf16Device(CpuDevice):
    """Stores bf16 arrays, as a GPU does, and takes only rows that need no conversion."""

    def write_rows(self, host: Any, array: Any, start: int) -> None:
        assert host.dtype == array.dtype
        super().write_rows(host, array, start)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_bf16_arrays_are_given_bf16_rows(tmp_path: Path, device: CpuDevice, dtype: str) -> None:
    write_checkpoint(tmp_path, dtype=dtype, fp32_extras=False)
    bf16_device = Bf16Device()
    config = ModelConfig.from_hf(tmp_path)
    found = flatten(load_weights(tmp_path, config, bf16_device, "bfloat16"))
    bf16_device.close()
    fp32 = {name for name, value in found.items() if value.dtype == np.float32}
    assert fp32 == {f"layers.{i}.mixer.{n}" for i in range(3) for n in ("a_log", "dt_bias", "norm")}
    assert_equal_weights(
        {name: value.astype(np.float32) for name, value in found.items()},
        flatten(load(tmp_path, device, round_bf16=True)),
    )


def test_every_bf16_value_becomes_the_same_fp32_value(device: CpuDevice) -> None:
    values = np.arange(1 << 16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    array = np.full((1 << 16) + 2, 7, np.float32)
    device.write_rows(values, array, 1)
    expected = values.astype(np.float32)
    np.testing.assert_array_equal(array[1:-1].view(np.uint32), expected.view(np.uint32))
    assert (array[0], array[-1]) == (7, 7)


# ---- copies that run behind the loader ----------------------------------------------------------


class LateStaging:
    """Copies out of a buffer happen when they are waited for and not before, as they may on a GPU.
    A buffer that is waited for is overwritten: who fills it again has the time to."""

    num_readers = 3

    def __init__(self, device: LateDevice, size: int) -> None:
        self.buffers = [np.empty(size, np.uint8) for _ in range(device.num_buffers)]
        self._device = device
        self._sent: list[list[tuple[Any, Any, int]]] = [[] for _ in self.buffers]

    def send(self, index: int, rows: Any, array: Any, start: int) -> None:
        self._sent[index].append((rows, array, start))

    def wait(self, index: int) -> None:
        for rows, array, start in self._sent[index]:
            self._device.write_rows(rows, array, start)
        self._sent[index].clear()
        self.buffers[index].fill(0xFF)

    def close(self) -> None:
        for index in range(len(self.buffers)):
            self.wait(index)
        self._device.closed = True


class LateDevice(CpuDevice):
    closed = False

    def __init__(self, size: int, num_buffers: int) -> None:
        super().__init__()
        self._size = size
        self.num_buffers = num_buffers

    def staging(self, row_bytes: int) -> Any:
        return LateStaging(self, max(self._size, row_bytes))


@pytest.mark.parametrize("num_buffers", [2, 3, 4, 16])
@pytest.mark.parametrize("size", [1, 3000, 1 << 20])
def test_late_copies_out_of_a_ring_change_nothing(
    tmp_path: Path, device: CpuDevice, num_buffers: int, size: int
) -> None:
    write_checkpoint(tmp_path, shards=3)
    late = LateDevice(size, num_buffers)
    found = flatten(load(tmp_path, late))
    late.close()
    assert_equal_weights(found, flatten(load(tmp_path, device)))


def test_buffers_are_given_back_after_an_error(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    late = LateDevice(100, 4)

    def fail(*_: object) -> None:
        raise RuntimeError("stop")

    threads = threading.active_count()
    with pytest.raises(RuntimeError, match="stop"):
        load(tmp_path, late, progress=fail)
    assert late.closed
    assert threading.active_count() == threads
    late.close()


# ---- progress, memory, reading -----------------------------------------------------------------


def test_progress_counts_the_bytes_of_the_text_model(tmp_path: Path, device: CpuDevice) -> None:
    write_checkpoint(tmp_path, shards=2, extra_tensors=True)
    seen: list[tuple[str, int, int]] = []
    load(tmp_path, device, progress=lambda *now: seen.append(now))
    total = sum(
        tensor.nbytes
        for path in tmp_path.glob("*.safetensors")
        for name, tensor in load_file(path).items()
        if not name.startswith(("mtp.", "model.visual."))
    )
    done = [now[1] for now in seen]
    assert {(stage, of) for stage, _, of in seen} == {("weights", total)}
    assert done == sorted(set(done))
    assert done[-1] == total


def test_host_memory_beside_the_arrays_is_the_staging_buffer(
    tmp_path: Path, device: CpuDevice
) -> None:
    """Far inside the promise of one shard plus 1 GiB: the file is 62 MB, the arrays twice that."""
    write_checkpoint(tmp_path, vocab_size=60_000, hidden_size=256, intermediate_size=1024)
    config = ModelConfig.from_hf(tmp_path)
    file_size = (tmp_path / "model.safetensors").stat().st_size
    tracemalloc.start()
    weights = load_weights(tmp_path, config, device, "float32")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    arrays = sum(array.nbytes for array in flatten(weights).values())
    assert file_size > 6 * STAGING_BYTES
    assert peak - arrays < 1.5 * STAGING_BYTES


def test_a_wrong_last_tensor_is_found_before_anything_is_read(
    tmp_path: Path, device: CpuDevice
) -> None:
    write_checkpoint(tmp_path, shards=3)
    last = sorted(tmp_path.glob("*.safetensors"))[-1]
    write_safetensors(last, {**load_file(last), "lm_head.weight": np.zeros((3, 3), np.float32)})

    def no_array(*_: object) -> None:
        raise AssertionError("allocated before all headers were checked")

    with pytest.MonkeyPatch.context() as patch, pytest.raises(CheckpointError, match=r"lm_head"):
        patch.setattr(device, "empty", no_array)
        load(tmp_path, device)


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path, device: CpuDevice) -> None:
    write_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    size = path.stat().st_size

    def shrink(_stage: str, done: int, _total: int) -> None:
        os.truncate(path, min(path.stat().st_size, size - 10))

    with pytest.raises(CheckpointError, match=r"model\.safetensors: shrank while it was read"):
        load(tmp_path, device, progress=shrink)


def test_the_index_may_list_more_files_than_the_text_needs(
    tmp_path: Path, device: CpuDevice
) -> None:
    write_checkpoint(tmp_path, shards=2)
    write_safetensors(tmp_path / "visual.safetensors", {"model.visual.x": np.zeros(2, np.int8)})
    index = tmp_path / "model.safetensors.index.json"
    value = json.loads(index.read_text())
    value["weight_map"]["model.visual.x"] = "visual.safetensors"
    index.write_text(json.dumps(value))
    load(tmp_path, device)
