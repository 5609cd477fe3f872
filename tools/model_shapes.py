"""Hugging Face text configs of the Qwen3.5 dense sizes (specification, section 1), and a small one
with their head dims that a CPU can run."""

from __future__ import annotations

from typing import Any

_COLUMNS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_value_heads",
    "tie_word_embeddings",
)
_ROWS: dict[str, tuple[Any, ...]] = {
    "0.8B": (1024, 3584, 24, 8, 2, 16, True),
    "2B": (2048, 6144, 24, 8, 2, 16, True),
    "4B": (2560, 9216, 32, 16, 4, 32, True),
    "9B": (4096, 12288, 32, 16, 4, 32, False),
    "27B": (5120, 17408, 64, 24, 4, 48, False),
    "small": (128, 256, 4, 8, 2, 32, True),
}
SIZES = tuple(_ROWS)
_SMALL_VOCAB = 1024


def hf_text_config(size: str) -> dict[str, Any]:
    """A flat config.json of a size."""
    own = dict(zip(_COLUMNS, _ROWS[size], strict=True))
    layers = own["num_hidden_layers"]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "layer_types": [
            "linear_attention" if (i + 1) % 4 else "full_attention" for i in range(layers)
        ],
        "vocab_size": _SMALL_VOCAB if size == "small" else 248320,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "eos_token_id": 1023 if size == "small" else 248044,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        **own,
    }
