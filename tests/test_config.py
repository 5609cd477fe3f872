"""ModelConfig.from_hf: the forms it reads (refusals: test_config_refusals); EngineConfig."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from deltaserve.engine.config import EngineConfig, ModelConfig
from tests.tiny_checkpoint import ENDOFTEXT_ID, IM_END_ID, nested_hf_config, tiny_hf_config

OFFICIAL_08B = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "image_token_id": 248056,
    "tie_word_embeddings": True,
    "vision_config": {"model_type": "qwen3_5", "depth": 12},
    "text_config": {
        "model_type": "qwen3_5_text",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "dtype": "bfloat16",
        "eos_token_id": 248044,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(24)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_value_head_dim": 128,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "tie_word_embeddings": True,
        "vocab_size": 248320,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
    },
}


# ---- what is read ------------------------------------------------------------------------------


def test_official_nested_config() -> None:
    config = ModelConfig.from_hf(OFFICIAL_08B)
    assert config == ModelConfig(
        hidden_size=1024,
        intermediate_size=3584,
        num_layers=24,
        layer_types=(("linear_attention",) * 3 + ("full_attention",)) * 6,
        num_query_heads=8,
        num_kv_heads=2,
        head_dim=256,
        rotary_dim=64,
        rope_theta=1e7,
        num_key_heads=16,
        num_value_heads=16,
        key_head_dim=128,
        value_head_dim=128,
        vocab_size=248320,
        tie_word_embeddings=True,
        rms_norm_eps=1e-6,
        max_position_embeddings=262144,
        eos_token_ids=(248044,),
    )
    assert config.conv_channels == 6144
    assert config.linear_in_size == 6144 + 2048 + 32
    assert config.attention_in_size == (16 + 4) * 256


def test_flat_equals_nested() -> None:
    flat = tiny_hf_config()
    expected = ModelConfig.from_hf(flat)
    assert ModelConfig.from_hf(nested_hf_config(flat)) == expected
    assert ModelConfig.from_hf({**flat, "model_type": "qwen3_5"}) == expected


def test_layer_types_default_to_every_fourth() -> None:
    config = ModelConfig.from_hf(tiny_hf_config(num_hidden_layers=9, layer_types=None))
    assert [i for i, k in enumerate(config.layer_types) if k == "full_attention"] == [3, 7]


def test_full_attention_interval_rules_where_layer_types_are_absent() -> None:
    config = tiny_hf_config(num_hidden_layers=6, layer_types=None, full_attention_interval=3)
    kinds = ModelConfig.from_hf(config).layer_types
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == [2, 5]


def test_explicit_layer_types_win() -> None:
    kinds = ["full_attention", "linear_attention", "full_attention"]
    config = ModelConfig.from_hf(tiny_hf_config(num_hidden_layers=3, layer_types=kinds))
    assert config.layer_types == tuple(kinds)


@pytest.mark.parametrize(
    ("text", "top", "tied"),
    [
        (True, False, True),
        (False, True, False),
        (None, True, True),
        (None, False, False),
        (True, None, True),
        (None, None, False),
    ],
)
def test_tied_is_the_text_models_word_first(
    text: bool | None, top: bool | None, tied: bool
) -> None:
    config = nested_hf_config(tiny_hf_config())
    config["text_config"]["tie_word_embeddings"] = text
    config["tie_word_embeddings"] = top
    assert ModelConfig.from_hf(config).tie_word_embeddings is tied


@pytest.mark.parametrize(
    ("keys", "rotary_dim", "theta"),
    [
        ({"rope_parameters": {"rope_theta": 5e5, "partial_rotary_factor": 0.5}}, 16, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5}}, 8, 5e5),
        ({"rope_parameters": {"rope_theta": 5e5}, "partial_rotary_factor": 1.0}, 32, 5e5),
        ({"rope_parameters": None, "rope_theta": 1e6}, 8, 1e6),
        ({"rope_parameters": None, "rope_theta": 10000, "partial_rotary_factor": 0.5}, 16, 1e4),
        ({"rope_parameters": {"rope_type": "default"}, "rope_theta": 10000}, 8, 1e4),
    ],
)
def test_rope_keys_inside_or_beside(keys: dict[str, Any], rotary_dim: int, theta: float) -> None:
    config = ModelConfig.from_hf(tiny_hf_config(**keys))
    assert (config.rotary_dim, config.rope_theta) == (rotary_dim, theta)


@pytest.mark.parametrize("form", ["directory", "file"])
def test_end_ids_are_those_of_both_files(tmp_path: Path, form: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_hf_config()))
    source = tmp_path if form == "directory" else tmp_path / "config.json"
    assert ModelConfig.from_hf(source).eos_token_ids == (ENDOFTEXT_ID,)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [IM_END_ID, ENDOFTEXT_ID]})
    )
    assert ModelConfig.from_hf(str(source)).eos_token_ids == (IM_END_ID, ENDOFTEXT_ID)


def test_no_end_id_is_no_error() -> None:
    assert ModelConfig.from_hf(tiny_hf_config(eos_token_id=None)).eos_token_ids == ()


# ---- EngineConfig ------------------------------------------------------------------------------


def test_engine_config_defaults() -> None:
    config = EngineConfig("models/demo")
    assert (config.max_num_batched_tokens, config.prefill_chunk, config.block_size) == (
        None,
        None,
        64,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model_path": ""}, "model_path: must be the path of a checkpoint, got ''"),
        ({"device": "gpu"}, "device: must be one of auto, cpu, cuda, got 'gpu'"),
        ({"dtype": "float16"}, "dtype: must be one of auto, float32, bfloat16, got 'float16'"),
        ({"device": "cuda", "dtype": "float32"}, "dtype: float32 is for device cpu"),
        ({"device_ordinal": -1}, "device_ordinal: must be from 0 to 1023, got -1"),
        ({"prefill_chunk": 100}, "prefill_chunk: must be a multiple of 64 from 64 to 1048576,"),
        ({"prefill_chunk": 0}, "prefill_chunk: must be a multiple of 64 from 64 to 1048576,"),
        ({"prefill_chunk": 64.0}, "prefill_chunk: must be an integer, got 64.0"),
        ({"max_num_batched_tokens": 1000}, "max_num_batched_tokens: must be a multiple of 64 "),
        (
            {"max_num_batched_tokens": 512, "prefill_chunk": 1024},
            "prefill_chunk: must not exceed max_num_batched_tokens 512, got 1024",
        ),
        ({"block_size": 16}, "block_size: must be a multiple of 64 from 64 to 1024, got 16"),
        ({"max_model_len": 1}, "max_model_len: must be from 2 to 2147483648, got 1"),
        ({"max_num_seqs": True}, "max_num_seqs: must be an integer, got True"),
        ({"kv_cache_memory": -5}, "kv_cache_memory: must be from 1 to "),
        ({"max_queue": 0}, "max_queue: must be from 1 to 1048576, got 0"),
        ({"seed": -1}, "seed: must be from 0 to "),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization: must be in (0, 1], got 0"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization: must be in (0, 1], got 1.5"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization: must be in (0, 1]"),
    ],
)
def test_engine_config_refusals(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        EngineConfig(**{"model_path": "models/demo", **options})
    assert str(caught.value).startswith(message)
