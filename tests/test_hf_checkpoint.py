"""Checkpoints as transformers itself writes them: its configs, its tensor names, its shards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deltaserve.engine.config import ModelConfig
from deltaserve.engine.ops.numpy.device import CpuDevice
from deltaserve.engine.weights import load_weights
from tests.slow_packing import assert_equal_weights, flatten, slow_packing
from tests.tiny_checkpoint import tiny_hf_config

pytestmark = pytest.mark.hf

VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 16,
}


def text_config(**overrides: Any) -> Any:
    from transformers import Qwen3_5TextConfig

    config = tiny_hf_config(**overrides)
    return Qwen3_5TextConfig(
        **{k: v for k, v in config.items() if k not in ("architectures", "model_type")}
    )


def check(directory: Path, model: Any, overrides: dict[str, Any]) -> None:
    config = ModelConfig.from_hf(directory)
    assert config == ModelConfig.from_hf(tiny_hf_config(**overrides))
    tensors = {
        name.removeprefix("model.").removeprefix("language_model."): value.float().numpy()
        for name, value in model.state_dict().items()
    }
    device = CpuDevice()
    found = flatten(load_weights(directory, config, device, "float32"))
    device.close()
    assert_equal_weights(found, slow_packing(tensors, tiny_hf_config(**overrides)))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_text_model_that_transformers_saved(tmp_path: Path, dtype: str, tied: bool) -> None:
    import torch
    from transformers import Qwen3_5ForCausalLM

    overrides = {"tie_word_embeddings": tied, "dtype": dtype, "num_hidden_layers": 8}
    model = Qwen3_5ForCausalLM(text_config(**overrides)).to(getattr(torch, dtype))
    model.save_pretrained(tmp_path, max_shard_size="300KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    check(tmp_path, model, overrides)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_vision_language_model_that_transformers_saved(tmp_path: Path, tied: bool) -> None:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    overrides = {"tie_word_embeddings": tied}
    config = Qwen3_5Config(
        text_config=text_config(**overrides).to_dict(),
        vision_config=VISION,
        tie_word_embeddings=tied,
    )
    model = Qwen3_5ForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    check(tmp_path, model, overrides)


def test_a_checkpoint_that_transformers_wrote_by_its_own_fixture(tmp_path: Path) -> None:
    """tools/gpu_verify.py, here on the CPU."""
    from tools.gpu_verify import main

    out = tmp_path / "result.json"
    words = ["--size", "small", "--device", "cpu", "--lengths", "1", "70", "--out", str(out)]
    assert main([*words, "--folder", str(tmp_path)]) == 0
    checks = json.loads(out.read_text())["checks"]
    assert [check["status"] for check in checks.values()] == [0, 1]
    assert [path.name for path in tmp_path.iterdir()] == ["result.json"]
