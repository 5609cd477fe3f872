"""Random weights in the place of a checkpoint's data."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from deltaserve.engine.config import ModelConfig
from deltaserve.engine.dummy_weights import dummy_weights
from deltaserve.engine.llm_engine import LLMEngine
from deltaserve.engine.ops.numpy.device import CpuDevice
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.tokenizer import Tokenizer
from deltaserve.engine.weights import load_weights
from tests.slow_packing import assert_equal_weights, flatten
from tests.tiny_checkpoint import tiny_hf_config, write_checkpoint
from tests.tiny_engine import engine_config, run_to_end, write_tiny_model
from tools import bench_engine, make_dummy_model
from tools.make_dummy_model import write_dummy_model


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    cpu = CpuDevice()
    yield cpu
    cpu.close()


@pytest.mark.parametrize("tied", [True, False])
def test_shapes_and_types_are_those_of_a_checkpoint(
    tmp_path: Path, device: CpuDevice, tied: bool
) -> None:
    write_checkpoint(tmp_path, tie_word_embeddings=tied)
    config = ModelConfig.from_hf(tmp_path)
    read = flatten(load_weights(tmp_path, config, device, "float32"))
    weights = dummy_weights(config, device, "float32")
    made = flatten(weights)
    assert {name: (a.shape, a.dtype) for name, a in made.items()} == {
        name: (a.shape, a.dtype) for name, a in read.items()
    }
    assert (weights.lm_head is weights.embed) == tied


def test_the_same_each_time_and_no_two_rows_alike(device: CpuDevice) -> None:
    config = ModelConfig.from_hf(tiny_hf_config())
    weights = flatten(dummy_weights(config, device, "float32"))
    assert_equal_weights(weights, flatten(dummy_weights(config, device, "float32")))
    for name, array in weights.items():
        if array.ndim == 2:
            assert len(np.unique(array, axis=0)) == len(array), name
    distinct = {id(array): array.tobytes() for array in weights.values()}  # tied ones are one
    assert len(set(distinct.values())) == len(distinct)


def test_rounded_values_are_bf16(device: CpuDevice) -> None:
    config = ModelConfig.from_hf(tiny_hf_config())
    weights = dummy_weights(config, device, "float32", round_bf16=True)
    assert not np.any(weights.embed.view(np.uint32) & 0xFFFF)
    assert np.any(weights.layers[0].mixer.a_log.view(np.uint32) & 0xFFFF)  # fp32 everywhere


def test_an_engine_on_them_reads_no_weights_and_varies_its_output(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    for file in tmp_path.glob("*.safetensors"):
        file.unlink()
    engine = LLMEngine(engine_config(tmp_path, load_format="dummy"))
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    engine.add_request("a", [1, 2, 3], params)
    engine.add_request("b", [3, 2, 1], params)
    outputs = run_to_end(engine)
    engine.close()
    ids = {name: [i for part in parts for i in part.token_ids] for name, parts in outputs.items()}
    assert all(len(row) == 24 and len(set(row)) > 8 for row in ids.values())
    assert ids["a"] != ids["b"]


def test_a_dummy_model_has_the_vocabulary_of_its_size(tmp_path: Path) -> None:
    write_dummy_model(tmp_path, "4B")
    config, tokenizer = ModelConfig.from_hf(tmp_path), Tokenizer(tmp_path)
    assert (config.num_layers, config.hidden_size) == (32, 2560)
    assert 248_000 < tokenizer.vocab_limit <= config.vocab_size
    assert set(config.eos_token_ids) <= tokenizer.end_ids
    text = "Any text, \u00e9 and \u4e16 too."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert "\ufffd" not in tokenizer.decode(range(256, tokenizer.vocab_limit))


def test_a_real_checkpoint_is_not_written_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    with pytest.raises(SystemExit, match="2"):
        make_dummy_model.main(["--size", "small", str(tmp_path)])
    assert "has weights" in capsys.readouterr().err
    assert (tmp_path / "config.json").read_text() == "{}"


@pytest.mark.parametrize(
    "flags",
    [["--concurrency", "0"], ["--rounds", "0"], ["--input-len", "0"], ["--model-path", "x"]],
)
def test_the_engine_benchmark_says_in_a_line_what_it_cannot_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    write_dummy_model(tmp_path, "small")
    common = ["--model-path", str(tmp_path), "--load-format", "dummy", "--device", "cpu"]
    with pytest.raises(SystemExit, match="2"):
        bench_engine.main([*common, "--concurrency", "1", *flags])
    assert ": error: " in capsys.readouterr().err.splitlines()[-1]
