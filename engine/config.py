"""ModelConfig and EngineConfig. `ModelConfig.from_hf` is the only reader of Hugging Face keys.

Everything here is refused or accepted before a weight is read; the weights themselves are checked
in `checkpoint`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from .json_section import Section, expected, read_json_object, show

LayerType = Literal["linear_attention", "full_attention"]

_MAX_LAYERS = 4096
_TEXT = "text_config"
_GRID = 64
_LOAD_FORMATS = ("safetensors", "dummy")
_DEVICES = ("auto", "cpu", "cuda")
_DTYPES = ("auto", "float32", "bfloat16")


class ConfigError(ValueError):
    """An EngineConfig that this machine or this model cannot follow. One line, which begins with
    the name of the field where it is one field's."""


@dataclass(frozen=True)
class ModelConfig:
    """A Qwen3.5 text model. Names are ours; see `ops.base` for the dimension letters."""

    hidden_size: int  # H
    intermediate_size: int  # F
    num_layers: int
    layer_types: tuple[LayerType, ...]
    num_query_heads: int  # NQ
    num_kv_heads: int  # NKV
    head_dim: int  # D
    rotary_dim: int  # R
    rope_theta: float
    num_key_heads: int  # HK
    num_value_heads: int  # HV
    key_head_dim: int  # K
    value_head_dim: int  # V
    vocab_size: int
    tie_word_embeddings: bool
    rms_norm_eps: float
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]

    @property
    def conv_channels(self) -> int:  # C
        return 2 * self.num_key_heads * self.key_head_dim + self.num_value_heads * (
            self.value_head_dim
        )

    @property
    def value_size(self) -> int:  # HV * V
        return self.num_value_heads * self.value_head_dim

    @property
    def linear_in_size(self) -> int:
        """Rows of the stacked qkv|z|b|a weight."""
        return self.conv_channels + self.value_size + 2 * self.num_value_heads

    @property
    def attention_in_size(self) -> int:
        """Rows of the stacked q|gate|k|v weight."""
        return (2 * self.num_query_heads + 2 * self.num_kv_heads) * self.head_dim

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path) -> ModelConfig:
        """Reads a config.json: its contents, its path, or the directory it lies in.

        Both forms are read: nested (the text model under `text_config`) and flat. From a path,
        `eos_token_ids` also has those of the generation_config.json beside it; the ids that only
        the tokenizer knows are added by whoever has it (`Tokenizer.end_ids`). Raises
        CheckpointError for what cannot be served and for missing or ill-typed keys.
        """
        if isinstance(source, Mapping):
            return _read_model_config("config.json", source, None)
        path = Path(source)
        path = path / "config.json" if path.is_dir() else path
        generation = path.with_name("generation_config.json")
        return _read_model_config(
            str(path),
            read_json_object(path),
            Section(str(generation), "", read_json_object(generation))
            if generation.exists()
            else None,
        )


@dataclass(frozen=True)
class EngineConfig:
    """What whoever starts an engine chooses; validated on construction with ValueError.

    None leaves the choice to the memory plan. Bytes for `kv_cache_memory` (which replaces
    `gpu_memory_utilization`, the fraction of the device's memory to use), tokens for the budgets:
    `max_num_batched_tokens` prompt tokens in a step where nothing decodes, `prefill_chunk` in the
    others. `max_queue`: requests beyond those that a free state slot awaits. `dtype` "auto" is
    float32 on the CPU and bfloat16 on CUDA; "bfloat16" on the CPU computes in float32 and rounds
    where CUDA rounds. `cuda_graph`: decode steps as CUDA graphs, no effect on the CPU.
    `snapshot_memory`: bytes for the states of cached prefixes, of which one is kept every
    `snapshot_interval` tokens. `load_format` "dummy" makes random weights instead of reading the
    checkpoint's. `enable_profiling`: NVTX ranges around steps, layers and ops. `seed` None draws a
    seed for each request that brings none.
    """

    model_path: str
    load_format: Literal["safetensors", "dummy"] = "safetensors"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    device_ordinal: int = 0
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    prefill_chunk: int | None = None
    block_size: int = 64
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.92
    max_queue: int = 1024
    seed: int | None = None
    cuda_graph: bool = True
    enable_prefix_caching: bool = True
    snapshot_memory: int | None = None
    snapshot_interval: int = 1024
    enable_profiling: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.model_path, str) or not self.model_path:
            raise ValueError(
                f"model_path: must be the path of a checkpoint, got {self.model_path!r}"
            )
        _check_choice("load_format", self.load_format, _LOAD_FORMATS)
        _check_choice("device", self.device, _DEVICES)
        _check_choice("dtype", self.dtype, _DTYPES)
        if self.device == "cuda" and self.dtype == "float32":
            raise ValueError("dtype: float32 is for device cpu; cuda computes in bfloat16")
        _check_int("device_ordinal", self.device_ordinal, 0, 1023)
        for name in ("max_num_batched_tokens", "prefill_chunk"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), _GRID, 1 << 20, multiple_of=_GRID)
        if (
            self.prefill_chunk is not None
            and self.max_num_batched_tokens is not None
            and self.prefill_chunk > self.max_num_batched_tokens
        ):
            raise ValueError(
                f"prefill_chunk: must not exceed max_num_batched_tokens"
                f" {self.max_num_batched_tokens}, got {self.prefill_chunk}"
            )
        _check_int("block_size", self.block_size, _GRID, 1024, multiple_of=_GRID)
        _check_int("snapshot_interval", self.snapshot_interval, _GRID, 1 << 20, multiple_of=_GRID)
        _check_int("max_queue", self.max_queue, 1, 1 << 20)
        for name in ("cuda_graph", "enable_prefix_caching", "enable_profiling"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}: must be true or false, got {getattr(self, name)!r}")
        for name, low, high in (
            ("max_model_len", 2, 1 << 31),  # a token of prompt and one of output
            ("max_num_seqs", 1, 1 << 16),
            ("kv_cache_memory", 1, 1 << 50),
            ("snapshot_memory", 0, 1 << 50),
        ):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low, high)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, (1 << 64) - 1)
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ValueError(f"gpu_memory_utilization: must be in (0, 1], got {share!r}")


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}: must be one of {', '.join(choices)}, got {value!r}")


def _check_int(name: str, value: object, low: int, high: int, multiple_of: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}: must be an integer, got {value!r}")
    if not low <= value <= high or value % multiple_of:
        grid = f"a multiple of {multiple_of} " if multiple_of > 1 else ""
        raise ValueError(f"{name}: must be {grid}from {low} to {high}, got {value}")


def _read_model_config(
    file: str, values: Mapping[str, Any], generation: Section | None
) -> ModelConfig:
    top = Section(file, "", values)
    model_type = top.get("model_type")
    if isinstance(model_type, str) and model_type.startswith("qwen3_5_moe"):
        top.refuse("model_type", f"{model_type} is a mixture of experts, which cannot be served")
    if model_type not in ("qwen3_5", "qwen3_5_text"):
        top.refuse("model_type", expected("qwen3_5 or qwen3_5_text", model_type))
    # A flat export may keep the type of the whole.
    flat = model_type == "qwen3_5_text" or ("num_hidden_layers" in values and not top.get(_TEXT))
    text = top if flat else top.section(_TEXT)
    text.only("model_type", model_type if flat else "qwen3_5_text")
    for section in (top, text):
        _refuse_unserved(section)

    num_layers = text.integer("num_hidden_layers", high=_MAX_LAYERS)
    num_query_heads = text.integer("num_attention_heads")
    num_kv_heads = text.integer("num_key_value_heads")
    if num_query_heads % num_kv_heads:
        text.refuse(
            "num_attention_heads",
            f"{num_query_heads} is no multiple of num_key_value_heads {num_kv_heads}",
        )
    num_key_heads = text.integer("linear_num_key_heads")
    num_value_heads = text.integer("linear_num_value_heads")
    if num_value_heads % num_key_heads:
        text.refuse(
            "linear_num_value_heads",
            f"{num_value_heads} is no multiple of linear_num_key_heads {num_key_heads}",
        )
    head_dim = text.integer("head_dim")
    rotary_dim, rope_theta = _read_rope(text, head_dim)
    vocab_size = text.integer("vocab_size")
    eos = text.token_ids("eos_token_id", vocab_size)
    if generation is not None:
        eos = generation.token_ids("eos_token_id", vocab_size) + eos
    return ModelConfig(
        hidden_size=text.integer("hidden_size"),
        intermediate_size=text.integer("intermediate_size"),
        num_layers=num_layers,
        layer_types=_read_layer_types(text, num_layers),
        num_query_heads=num_query_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=rotary_dim,
        rope_theta=rope_theta,
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_head_dim=text.integer("linear_key_head_dim"),
        value_head_dim=text.integer("linear_value_head_dim"),
        vocab_size=vocab_size,
        tie_word_embeddings=_read_tied(text, top),
        rms_norm_eps=text.number("rms_norm_eps"),
        max_position_embeddings=text.integer("max_position_embeddings", high=1 << 31),
        eos_token_ids=tuple(dict.fromkeys(eos)),
    )


def _refuse_unserved(section: Section) -> None:
    for key in ("quantization_config", "compression_config"):
        quantization = section.get(key)
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, dict) else None
            section.refuse(key, f"quantised weights ({show(method)}) cannot be served")
    for key in ("num_experts", "num_local_experts"):
        if section.get(key):
            section.refuse(key, "a mixture of experts cannot be served")
    section.only("hidden_act", "silu")
    section.only("attention_bias", False)
    section.only("linear_conv_kernel_dim", 4)


def _read_layer_types(text: Section, num_layers: int) -> tuple[LayerType, ...]:
    """The explicit list, else full attention in every `full_attention_interval`-th layer."""
    value = text.get("layer_types")
    if value is None:
        interval = text.integer("full_attention_interval", default=4)
        return tuple(
            "linear_attention" if (i + 1) % interval else "full_attention"
            for i in range(num_layers)
        )
    if not isinstance(value, list) or len(value) != num_layers:
        found = f"{len(value)} entries" if isinstance(value, list) else show(value)
        text.refuse("layer_types", f"expected num_hidden_layers = {num_layers} names, got {found}")
    for i, name in enumerate(value):
        if name not in get_args(LayerType):
            text.refuse(f"layer_types[{i}]", expected(" or ".join(get_args(LayerType)), name))
    return tuple(cast("list[LayerType]", value))


def _read_rope(text: Section, head_dim: int) -> tuple[int, float]:
    """(rotary_dim, rope_theta). Newer configs have both in `rope_parameters`, older ones beside."""
    rope = text
    for key in ("rope_parameters", "rope_scaling"):
        if text.get(key) is None:
            continue
        section = text.section(key)
        section.only("rope_type", "default")
        section.only("type", "default")
        if key == "rope_parameters":
            rope = section
    theta, factor = (
        rope if rope.get(key) is not None else text
        for key in ("rope_theta", "partial_rotary_factor")
    )
    rope_theta = theta.number("rope_theta")
    fraction = factor.number("partial_rotary_factor", default=0.25)
    rotary_dim = int(head_dim * fraction)
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        factor.refuse(
            "partial_rotary_factor",
            f"{fraction:g} of head_dim {head_dim} is {rotary_dim} rotary dims; they must be even"
            " and from 2 to head_dim",
        )
    return rotary_dim, rope_theta


def _read_tied(text: Section, top: Section) -> bool:
    """The text model's word, else the top level's, else false."""
    for section in (text, top):
        value = section.get("tie_word_embeddings")
        if isinstance(value, bool):
            return value
        if value is not None:
            section.refuse("tie_word_embeddings", expected("true or false", value))
    return False
