"""ModelConfig.from_hf: the forms it reads and what it refuses; EngineConfig's limits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.engine.config import EngineConfig, ModelConfig
from deltaserve.engine.json_section import CheckpointError
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


def refusal(config: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        ModelConfig.from_hf(config)
    message = str(caught.value)
    assert "\n" not in message
    return message


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


# ---- what is refused ---------------------------------------------------------------------------

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


# ---- EngineConfig ------------------------------------------------------------------------------


def test_engine_config_defaults() -> None:
    config = EngineConfig("models/demo")
    assert (config.max_num_batched_tokens, config.prefill_chunk, config.block_size) == (
        8192,
        1024,
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
            {"max_num_batched_tokens": 512},
            "prefill_chunk: must not exceed max_num_batched_tokens 512, got 1024",
        ),
        ({"block_size": 16}, "block_size: must be a multiple of 64 from 64 to 1024, got 16"),
        ({"max_model_len": 0}, "max_model_len: must be from 1 to 2147483648, got 0"),
        ({"max_num_seqs": True}, "max_num_seqs: must be an integer, got True"),
        ({"kv_cache_memory": -5}, "kv_cache_memory: must be from 1 to "),
        ({"max_queue": -1}, "max_queue: must be from 0 to 1048576, got -1"),
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
