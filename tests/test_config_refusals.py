"""What ModelConfig.from_hf refuses, and by which message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.engine.config import ModelConfig
from deltaserve.engine.json_section import CheckpointError
from tests.tiny_checkpoint import nested_hf_config, tiny_hf_config


def refusal(config: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_hf(config)
    message = str(caught.value)
    assert "\n" not in message
    return message


REQUIRED = [
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
]


@pytest.mark.parametrize("key", REQUIRED)
def test_missing_key_is_named(key: str) -> None:
    config = nested_hf_config(tiny_hf_config())
    del config["text_config"][key]
    assert refusal(config).startswith(f"config.json: text_config.{key}: missing; expected ")


@pytest.mark.parametrize("key", REQUIRED)
@pytest.mark.parametrize("value", [0, -1, "64", True, [64], {}, float("nan"), float("inf"), 1e40])
def test_wrong_value_is_named_and_shown(key: str, value: Any) -> None:
    message = refusal(tiny_hf_config(**{key: value}, layer_types=None))
    assert message.startswith(f"config.json: {key}: expected ")
    assert message.endswith(f", got {json.dumps(value)}")


@pytest.mark.parametrize("key", [key for key in REQUIRED if key != "rms_norm_eps"])
@pytest.mark.parametrize("value", [64.0, 2**40])
def test_sizes_are_integers_within_reason(key: str, value: Any) -> None:
    message = refusal(tiny_hf_config(**{key: value}, layer_types=None))
    assert message.startswith(f"config.json: {key}: expected an integer from 1 to ")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"model_type": "qwen3_next"}, 'model_type: expected qwen3_5 or qwen3_5_text, got "qwen3'),
        ({"model_type": None}, "model_type: missing; expected qwen3_5 or qwen3_5_text"),
        ({"model_type": 5}, "model_type: expected qwen3_5 or qwen3_5_text, got 5"),
        (
            {"model_type": "qwen3_5_moe_text"},
            "model_type: qwen3_5_moe_text is a mixture of experts, which cannot be served",
        ),
        ({"num_experts": 256}, "num_experts: a mixture of experts cannot be served"),
        (
            {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3"}},
            'quantization_config: quantised weights ("fp8") cannot be served',
        ),
        ({"quantization_config": {}}, "quantization_config: quantised weights (null)"),
        ({"attention_bias": True}, "attention_bias: only false can be served, found true"),
        ({"attention_bias": 0}, "attention_bias: only false can be served, found 0"),
        ({"hidden_act": "gelu"}, 'hidden_act: only "silu" can be served, found "gelu"'),
        ({"linear_conv_kernel_dim": 3}, "linear_conv_kernel_dim: only 4 can be served, found 3"),
        (
            {"num_attention_heads": 5},
            "num_attention_heads: 5 is no multiple of num_key_value_heads 2",
        ),
        (
            {"linear_num_value_heads": 3},
            "linear_num_value_heads: 3 is no multiple of linear_num_key_heads 2",
        ),
        (
            {"layer_types": ["linear_attention"] * 3},
            "layer_types: expected num_hidden_layers = 4 names, got 3 entries",
        ),
        ({"layer_types": "full"}, "layer_types: expected num_hidden_layers = 4 names, got "),
        (
            {"layer_types": ["linear_attention"] * 3 + ["sliding_attention"]},
            'layer_types[3]: expected linear_attention or full_attention, got "sliding_attention"',
        ),
        ({"layer_types": [None] * 4}, "layer_types[0]: missing; expected linear_attention or"),
        ({"layer_types": [["x"]] * 4}, "layer_types[0]: expected linear_attention or"),
        ({"layer_types": None, "full_attention_interval": 0}, "full_attention_interval: expected"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e7, "factor": 4.0}},
            'rope_parameters.rope_type: only "default" can be served, found "yarn"',
        ),
        (
            {"rope_parameters": {"type": "linear", "rope_theta": 1e7}},
            'rope_parameters.type: only "default" can be served, found "linear"',
        ),
        (
            {"rope_scaling": {"type": "yarn", "factor": 4.0}},
            'rope_scaling.type: only "default" can be served, found "yarn"',
        ),
        ({"rope_scaling": "yarn"}, 'rope_scaling: expected an object, got "yarn"'),
        ({"rope_parameters": None}, "rope_theta: missing; expected a positive number"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_parameters.rope_theta: expected a pos"),
        (
            {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 0.1}},
            "rope_parameters.partial_rotary_factor: 0.1 of head_dim 32 is 3 rotary dims;",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e7, "partial_rotary_factor": 2}},
            "rope_parameters.partial_rotary_factor: 2 of head_dim 32 is 64 rotary dims;",
        ),
        ({"eos_token_id": 320}, "eos_token_id: expected token ids below 320, got 320"),
        ({"eos_token_id": [1, -1]}, "eos_token_id: expected token ids below 320, got [1, -1]"),
        ({"eos_token_id": "x"}, 'eos_token_id: expected token ids below 320, got "x"'),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings: expected true or false, got"),
    ],
)
@pytest.mark.parametrize("form", ["flat", "nested"])
def test_refusals(overrides: dict[str, Any], message: str, form: str) -> None:
    config = {**tiny_hf_config(), **overrides}
    if form == "flat":
        assert refusal(config).startswith(f"config.json: {message}")
    elif "model_type" not in overrides:
        assert refusal(nested_hf_config(config)).startswith(f"config.json: text_config.{message}")


def test_quantisation_is_refused_at_the_top_level_too() -> None:
    config = nested_hf_config(tiny_hf_config())
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    assert refusal(config).startswith('config.json: quantization_config: quantised weights ("gptq"')


@pytest.mark.parametrize("value", [None, 3, []])
def test_nested_config_needs_its_text_config(value: Any) -> None:
    config = {**nested_hf_config(tiny_hf_config()), "text_config": value}
    assert refusal(config).startswith("config.json: text_config: ")


def test_nested_text_model_of_another_type() -> None:
    config = nested_hf_config(tiny_hf_config())
    config["text_config"]["model_type"] = "qwen3_next"
    assert refusal(config).startswith("config.json: text_config.model_type: only ")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
        (b"1" * 10_000, "not valid JSON"),
        (b"[]", "expected a JSON object, found []"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_files_that_are_no_json_object(
    tmp_path: Path, content: bytes, message: str, name: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_hf_config()))
    (tmp_path / name).write_bytes(content)
    assert refusal(tmp_path).startswith(f"{tmp_path / name}: {message}")


def test_missing_file_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path) == f"{tmp_path}/config.json: no such file"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda values: st.lists(values, max_size=4) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=6,
)
KEYS = sorted({*tiny_hf_config(), "rope_theta", "rope_scaling", "text_config", "num_experts"})


@given(values=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=3), nested=st.booleans())
def test_any_values_are_read_or_refused(values: dict[str, Any], nested: bool) -> None:
    config = {**tiny_hf_config(), **values}
    try:
        ModelConfig.from_hf(nested_hf_config(config) if nested else config)
    except CheckpointError as error:
        assert "\n" not in str(error)
