"""Writes random Qwen3.5 checkpoints in Hugging Face layout, and a byte-level tokenizer, for tests.

The tensor names and shapes are written out here a second time, from the specification (section 2),
and not taken from the engine: a test that loads such a checkpoint compares two statements of them.
Weights can show mistakes: norms, A_log and dt_bias are random, the decay is slow enough that the
recurrent state matters over hundreds of tokens, and the logits' standard deviation is about 3.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

_MERGES = (
    ("Ġ", "t"),
    ("h", "e"),
    ("Ġt", "he"),
    ("i", "n"),
    ("e", "r"),
    ("a", "n"),
    ("r", "e"),
    ("o", "n"),
    ("Ġ", "a"),
    ("Ġ", "s"),
    ("o", "u"),
    ("l", "l"),
)
ENDOFTEXT_ID = 256 + len(_MERGES)
IM_START_ID = ENDOFTEXT_ID + 1
IM_END_ID = ENDOFTEXT_ID + 2
NUM_TOKENS = ENDOFTEXT_ID + 3
"""Ids of the tokenizer that `write_tokenizer` writes; the ids from here on are padding rows."""

_DTYPES = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
}


def tiny_hf_config(**overrides: Any) -> dict[str, Any]:
    """A flat text config; `overrides` replaces keys and adds new ones, None removes a key.

    The defaults can show mistakes of wiring: three value heads a key head, two query heads a KV
    head, K != V, one full-attention layer in four, untied. `num_hidden_layers` alone changes the
    layer list by the rule of every fourth.
    """
    config: dict[str, Any] = {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 6,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "vocab_size": 320,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "eos_token_id": ENDOFTEXT_ID,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
        },
        "dtype": "bfloat16",
    }
    config |= overrides
    config = {key: value for key, value in config.items() if value is not None}
    if "layer_types" not in overrides:
        config["layer_types"] = [
            "full_attention" if (i + 1) % 4 == 0 else "linear_attention"
            for i in range(config["num_hidden_layers"])
        ]
    elif overrides["layer_types"] is None:
        config.pop("layer_types", None)
    return config


def nested_hf_config(text_config: dict[str, Any]) -> dict[str, Any]:
    """The vision-language form of a flat config: the text model under `text_config`."""
    text = {key: value for key, value in text_config.items() if key != "architectures"}
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


def text_tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """name -> shape of every text tensor, without the prefix; `lm_head.weight` only if untied."""
    hidden, mlp = config["hidden_size"], config["intermediate_size"]
    query, kv, head = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
    )
    value_heads, value_dim = config["linear_num_value_heads"], config["linear_value_head_dim"]
    value_size = value_heads * value_dim
    channels = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"] + value_size
    layer_types = config.get("layer_types") or [
        "full_attention" if (i + 1) % 4 == 0 else "linear_attention"
        for i in range(config["num_hidden_layers"])
    ]
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (config["vocab_size"], hidden),
        "norm.weight": (hidden,),
    }
    for i, kind in enumerate(layer_types):
        layer: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (mlp, hidden),
            "mlp.up_proj.weight": (mlp, hidden),
            "mlp.down_proj.weight": (hidden, mlp),
        }
        if kind == "full_attention":
            layer |= {
                "self_attn.q_proj.weight": (query * 2 * head, hidden),
                "self_attn.k_proj.weight": (kv * head, hidden),
                "self_attn.v_proj.weight": (kv * head, hidden),
                "self_attn.o_proj.weight": (hidden, query * head),
                "self_attn.q_norm.weight": (head,),
                "self_attn.k_norm.weight": (head,),
            }
        else:
            layer |= {
                "linear_attn.in_proj_qkv.weight": (channels, hidden),
                "linear_attn.in_proj_z.weight": (value_size, hidden),
                "linear_attn.in_proj_b.weight": (value_heads, hidden),
                "linear_attn.in_proj_a.weight": (value_heads, hidden),
                "linear_attn.conv1d.weight": (channels, 1, 4),
                "linear_attn.dt_bias": (value_heads,),
                "linear_attn.A_log": (value_heads,),
                "linear_attn.norm.weight": (value_dim,),
                "linear_attn.out_proj.weight": (hidden, value_size),
            }
        shapes |= {f"layers.{i}.{name}": shape for name, shape in layer.items()}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return shapes


def random_tensor(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> np.ndarray:
    """fp32 values of the kind that the tensor called `name` (with or without prefix) holds."""
    if name.endswith("A_log"):
        return np.log(rng.uniform(0.01, 2.0, shape)).astype(np.float32)
    values = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("dt_bias"):
        return values * np.float32(0.5) - np.float32(1)
    if name.endswith("linear_attn.norm.weight"):
        return values * np.float32(0.2) + np.float32(1)
    if name.endswith("norm.weight"):
        return values * np.float32(0.2)
    if name.endswith("conv1d.weight"):
        return values * np.float32(0.5)
    values *= np.float32((3.0 if name.endswith(_LOGIT_WEIGHTS) else 1.0) / np.sqrt(shape[-1]))
    return values


_LOGIT_WEIGHTS = ("embed_tokens.weight", "lm_head.weight")
_FP32_TENSORS = ("linear_attn.A_log", "linear_attn.norm.weight")


def write_safetensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """One file in the safetensors format, through the library (bf16 as `ml_dtypes.bfloat16`)."""
    save_file(tensors, path, {"format": "pt"})


def _extra_tensors(rng: np.random.Generator) -> Iterator[tuple[str, np.ndarray]]:
    """Stand-ins for the vision tower and the MTP layer, which the engine skips."""
    for name in ("model.visual.patch_embed.proj.weight", "mtp.fc.weight", "mtp.norm.weight"):
        yield name, rng.standard_normal((4, 8), dtype=np.float32)


def write_checkpoint(
    directory: str | Path,
    *,
    seed: int = 0,
    shards: int = 1,
    nested: bool = True,
    dtype: str = "bfloat16",
    prefix: str | None = None,
    fp32_extras: bool = True,
    extra_tensors: bool = False,
    generation_eos: int | list[int] | None = None,
    **config_overrides: Any,
) -> None:
    """Writes config.json and the weights of a random model into `directory` (made if absent).

    `config_overrides` are those of `tiny_hf_config`. `prefix` of the text tensors: by default
    "model.language_model." when nested, else "model.". `fp32_extras`: A_log and the gated norm are
    F32, as in Qwen3.5, else they have `dtype`. `shards` > 1 writes an index. `generation_eos`
    writes generation_config.json. Equal values for equal `seed`, dims and dtype, whatever the
    sharding and prefix. Holds one shard in memory.
    """
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    config = tiny_hf_config(**{"dtype": dtype, **config_overrides})
    written = nested_hf_config(config) if nested else config
    (path / "config.json").write_text(json.dumps(written, indent=1))
    if generation_eos is not None:
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation_eos}))
    if prefix is None:
        prefix = "model.language_model." if nested else "model."

    rng = np.random.default_rng(seed)
    shapes = text_tensor_shapes(config)
    names = list(shapes)
    per_shard = -(-sum(int(np.prod(s)) for s in shapes.values()) // shards)
    weight_map: dict[str, str] = {}
    shard: dict[str, np.ndarray] = {}
    elements = 0
    number = 1
    for position, name in enumerate(names):
        full_name = name if name == "lm_head.weight" else prefix + name
        keep = fp32_extras and name.endswith(_FP32_TENSORS)
        target = _DTYPES["float32" if keep else dtype]
        shard[full_name] = random_tensor(name, shapes[name], rng).astype(target, copy=False)
        elements += shard[full_name].size
        last = position == len(names) - 1
        if last and extra_tensors:
            shard |= dict(_extra_tensors(rng))
        left = len(names) - 1 - position
        if last or (number < shards and (elements >= per_shard or left <= shards - number)):
            file = (
                f"model-{number:05}-of-{shards:05}.safetensors"
                if shards > 1
                else "model.safetensors"
            )
            write_safetensors(path / file, shard)
            weight_map |= dict.fromkeys(shard, file)
            shard, elements, number = {}, 0, number + 1
    if shards > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (path / "model.safetensors.index.json").write_text(json.dumps(index))


def write_tokenizer(directory: str | Path) -> None:
    """Writes tokenizer.json (byte-level BPE: 256 bytes, a few merges, three special tokens).

    Ids 0..255 are the bytes in order, so that any byte sequence decodes; the specials are
    <|endoftext|>, <|im_start|>, <|im_end|> (`ENDOFTEXT_ID` and so on).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {char: byte for byte, char in enumerate(_byte_characters())}
    for left, right in _MERGES:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(_MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in specials])
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))


def _byte_characters() -> list[str]:
    """The printable stand-in of each byte in a byte-level vocabulary."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    stand_ins = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in stand_ins]
    stand_ins |= {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [stand_ins[byte] for byte in range(256)]
