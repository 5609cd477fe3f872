"""What each thing takes in bytes, from the shapes in `cache`, `models` and `sampler`.

`act` is the size of an activation, a weight or a cached key: 4 on the CPU, 2 on CUDA. Recurrent
state, logits, partial sums and the few vectors of a linear layer are fp32 everywhere.
"""

from __future__ import annotations

from .config import ModelConfig
from .forward_batch import mask_words
from .logit_adjustments import adjustment_bytes
from .ops.base import CONV_RING, MAX_SEGMENTS

_FP32 = 4
_INT32 = 4


def weight_bytes(model: ModelConfig, act: int) -> int:
    h, mlp = model.hidden_size, 3 * model.hidden_size * model.intermediate_size
    attention = h * (model.attention_in_size + model.num_query_heads * model.head_dim)
    attention += 2 * model.head_dim
    delta_net = h * (model.linear_in_size + model.value_size) + CONV_RING * model.conv_channels
    vectors = 2 * model.num_value_heads + model.value_head_dim  # fp32
    num_attention = model.layer_types.count("full_attention")
    num_linear = model.num_layers - num_attention
    elements = num_attention * attention + num_linear * delta_net
    elements += model.num_layers * (mlp + 2 * h) + h
    elements += model.vocab_size * h * (1 if model.tie_word_embeddings else 2)
    return act * elements + _FP32 * num_linear * vectors


def activation_bytes(model: ModelConfig, num_tokens: int, num_seqs: int, act: int) -> int:
    """What `models.buffers.allocate_buffers` takes for steps of so many prompt tokens and decode
    rows."""
    query_size = model.num_query_heads * model.head_dim
    delta_net = model.linear_in_size + model.conv_channels + model.value_size
    attention = model.attention_in_size + 2 * query_size
    width = max(delta_net, attention, model.intermediate_size)
    tokens = max(num_tokens, num_seqs)
    partials = _FP32 * MAX_SEGMENTS * num_seqs * model.hidden_size
    return act * tokens * (3 * model.hidden_size + width) + partials


def sampling_bytes(model: ModelConfig, num_seqs: int) -> int:
    """Penalty counts, biases and bitmasks."""
    masks = _INT32 * num_seqs * mask_words(model.vocab_size)
    return adjustment_bytes(num_seqs, model.vocab_size) + masks


def slot_bytes(model: ModelConfig, act: int) -> int:
    """The recurrent and conv state of one sequence, or of one snapshot."""
    state = _FP32 * model.num_value_heads * model.key_head_dim * model.value_head_dim
    conv = act * CONV_RING * model.conv_channels
    return model.layer_types.count("linear_attention") * (state + conv)


def block_bytes(model: ModelConfig, block_size: int, act: int) -> int:
    """Keys and values of one block in all full-attention layers."""
    tokens = 2 * model.num_kv_heads * block_size * model.head_dim
    return act * model.layer_types.count("full_attention") * tokens
