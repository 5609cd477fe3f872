"""ModelConfig and EngineConfig. `ModelConfig.from_hf` is the only reader of Hugging Face keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

LayerType = Literal["linear_attention", "full_attention"]


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
