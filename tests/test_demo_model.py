"""The committed demo checkpoint: its files agree with each other and with the model's layout."""

import json
from pathlib import Path

import jinja2
import pytest
from safetensors import safe_open
from tokenizers import Tokenizer

FOLDER = Path(__file__).resolve().parent.parent / "models" / "demo"
PREFIX = "model.language_model."


@pytest.fixture(scope="module")
def text_config() -> dict:
    return json.loads((FOLDER / "config.json").read_text())["text_config"]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


@pytest.fixture(scope="module")
def tensors() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype, shape) of the weights file."""
    with safe_open(FOLDER / "model.safetensors", framework="numpy") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (s.get_dtype(), tuple(s.get_shape())) for name, s in slices.items()}


def render(messages: list[dict], **options: object) -> str:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    template = environment.from_string((FOLDER / "chat_template.jinja").read_text().rstrip("\n"))
    return template.render(messages=messages, **options)


def test_config_has_the_dims_that_kernels_are_built_for(text_config: dict) -> None:
    assert json.loads((FOLDER / "config.json").read_text())["model_type"] == "qwen3_5"
    assert text_config["head_dim"] == 256
    assert text_config["linear_key_head_dim"] == text_config["linear_value_head_dim"] == 128
    assert text_config["hidden_size"] == 128
    kinds = text_config["layer_types"]
    assert [i for i, kind in enumerate(kinds) if kind == "full_attention"] == [3, 7]
    assert len(kinds) == text_config["num_hidden_layers"] == 8


def test_weights_are_those_of_the_official_layout(text_config: dict, tensors: dict) -> None:
    h, f = text_config["hidden_size"], text_config["intermediate_size"]
    expected = {"embed_tokens.weight": (text_config["vocab_size"], h), "norm.weight": (h,)}
    for i, kind in enumerate(text_config["layer_types"]):
        layer = {
            "input_layernorm.weight": (h,), "post_attention_layernorm.weight": (h,),
            "mlp.gate_proj.weight": (f, h), "mlp.up_proj.weight": (f, h),
            "mlp.down_proj.weight": (h, f),
        }  # fmt: skip
        if kind == "full_attention":
            shapes = {"q_proj": (4096, h), "k_proj": (512, h), "v_proj": (512, h),
                      "o_proj": (h, 2048), "q_norm": (256,), "k_norm": (256,)}  # fmt: skip
            layer |= {f"self_attn.{name}.weight": shape for name, shape in shapes.items()}
        else:
            shapes = {"in_proj_qkv.weight": (1024, h), "in_proj_z.weight": (512, h),
                      "in_proj_b.weight": (4, h), "in_proj_a.weight": (4, h),
                      "conv1d.weight": (1024, 1, 4), "dt_bias": (4,), "A_log": (4,),
                      "norm.weight": (128,), "out_proj.weight": (h, 512)}  # fmt: skip
            layer |= {f"linear_attn.{name}": shape for name, shape in shapes.items()}
        expected |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    assert {name: shape for name, (_, shape) in tensors.items()} == {
        PREFIX + name: shape for name, shape in expected.items()
    }


def test_only_decay_rates_and_gated_norms_are_float32(tensors: dict) -> None:
    for name, (dtype, _) in tensors.items():
        wide = name.endswith((".A_log", ".linear_attn.norm.weight"))
        assert dtype == ("F32" if wide else "BF16"), name


def test_checkpoint_fits_its_size_limit() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 14_000_000


def test_embedding_has_padding_rows_beyond_the_tokenizer(
    text_config: dict, tokenizer: Tokenizer
) -> None:
    assert text_config["vocab_size"] % 64 == 0
    assert tokenizer.get_vocab_size() < text_config["vocab_size"] <= 8192


def test_stop_ids_are_the_end_tokens(text_config: dict, tokenizer: Tokenizer) -> None:
    generation = json.loads((FOLDER / "generation_config.json").read_text())
    ends = [tokenizer.token_to_id(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert generation["eos_token_id"] == ends
    assert text_config["eos_token_id"] == ends[1]


@pytest.mark.parametrize("text", ["Once upon a time", "naïve café 你好 🙂", "a\n\n  b\t1234"])
def test_tokenizer_gives_any_text_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_digits_are_one_token_each(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode(" 4719").tokens[1:] == ["4", "7", "1", "9"]
    assert len(tokenizer.encode(" Paris").ids) == 1


def test_markers_of_turns_thinking_and_tools_are_single_tokens(tokenizer: Tokenizer) -> None:
    for token in ("<|im_start|>", "<think>", "</think>", "<tool_call>", "</tool_call>"):
        assert len(tokenizer.encode(token).ids) == 1


def test_chat_prompt_leaves_thinking_off_unless_asked() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello!"}]
    turns = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello!<|im_end|>\n"
    off = turns + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    on = turns + "<|im_start|>assistant\n<think>\n"
    assert render(messages, add_generation_prompt=True) == off
    assert render(messages, add_generation_prompt=True, enable_thinking=False) == off
    assert render(messages, add_generation_prompt=True, enable_thinking=True) == on


def test_thoughts_of_earlier_turns_are_dropped() -> None:
    messages = [
        {"role": "user", "content": "Hi!"},
        {"role": "assistant", "content": "<think>\nA greeting.\n</think>\n\nHello!"},
        {"role": "user", "content": "Bye!"},
    ]
    assert "<|im_start|>assistant\nHello!<|im_end|>" in render(messages)


def test_tool_calls_and_results_have_one_form() -> None:
    function = {"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}
    messages = [
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": "", "tool_calls": [{"function": function}]},
        {"role": "tool", "content": "sunny"},
    ]
    text = render(messages, tools=[{"type": "function", "function": {"name": "get_weather"}}])
    assert '<tools>\n{"type": "function", "function": {"name": "get_weather"}}\n</tools>' in text
    assert (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "<parameter=days>\n2\n</parameter>\n</function>\n</tool_call><|im_end|>\n"
    ) in text
    assert "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>\n" in text


def test_both_copies_of_the_chat_template_are_equal() -> None:
    inside = json.loads((FOLDER / "tokenizer_config.json").read_text())["chat_template"]
    assert inside == (FOLDER / "chat_template.jinja").read_text().rstrip("\n")
