"""Linear attention: cuda/causal_conv1d.cu, cuda/delta_net_decode.cu and
triton_aot/kernels/delta_rule_prefill.py."""

from __future__ import annotations

from typing import Any

from ...forward_batch import DecodeBatch, PrefillBatch
from ..base import DELTA_CHUNK
from .kernels import Kernels

Array = Any

HEAD = 128  # K = V
_CHANNELS = 8  # a thread of the convolution
_CONV_THREADS = 128
_CONV_TOKENS, _FEW_CONV_TOKENS = 16, 8  # a block; fewer where the card has blocks to spare


class PrefillWorkspace:
    """What the four kernels of `delta_rule_prefill` hand over, for up to `max_tokens` tokens.
    `empty(shape, dtype)` allocates."""

    def __init__(self, empty: Any, act_dtype: Any, max_tokens: int, value_heads: int) -> None:
        rows = (value_heads, max_tokens)
        self.w = empty((*rows, HEAD), act_dtype)
        self.u = empty((*rows, HEAD), act_dtype)
        self.p = empty((*rows, DELTA_CHUNK), act_dtype)
        self.a = empty((*rows, DELTA_CHUNK), "float32")
        self.g, self.beta, self.q_scale, self.w_scale, self.carried = (
            empty(rows, "float32") for _ in range(5)
        )


def causal_conv1d(
    kernels: Kernels,
    qkvzba: Array,
    weight: Array,
    batch: PrefillBatch,
    conv_state: Array,
    out: Array,
) -> None:
    tokens, channels = out.shape
    assert channels % _CHANNELS == 0 and qkvzba.shape[1] % _CHANNELS == 0
    columns = -(-channels // _CHANNELS // _CONV_THREADS)
    many = columns * tokens >= 2 * kernels.num_multiprocessors * _CONV_TOKENS
    rows = _CONV_TOKENS if many else _FEW_CONV_TOKENS
    sequences = (batch.cu_seqlens, batch.start_positions)
    kernels.launch(
        "causal_conv1d",
        (columns, -(-tokens // rows), 1),
        _CONV_THREADS,
        qkvzba,
        weight,
        *sequences,
        batch.initial_slots,
        conv_state,
        out,
        tokens,
        batch.num_seqs,
        channels,
        qkvzba.shape[1],
        rows,
    )
    kernels.launch(
        "conv_state_update",
        (columns, batch.num_seqs, 1),
        _CONV_THREADS,
        qkvzba,
        *sequences,
        batch.state_slots,
        batch.initial_slots,
        batch.snapshot_starts,
        batch.snapshot_positions,
        batch.snapshot_slots,
        conv_state,
        channels,
        qkvzba.shape[1],
    )


def delta_rule_prefill(
    kernels: Kernels,
    qkv: Array,
    qkvzba: Array,
    a_log: Array,
    dt_bias: Array,
    batch: PrefillBatch,
    recurrent_state: Array,
    workspace: PrefillWorkspace,
    out: Array,
) -> None:
    tokens, channels = qkv.shape
    _, value_heads, key_dim, value_dim = recurrent_state.shape
    key_heads = (channels - value_heads * value_dim) // (2 * key_dim)
    assert key_dim == value_dim == HEAD and tokens <= workspace.w.shape[1]
    w = workspace
    sequences = (batch.cu_seqlens, batch.start_positions)
    chunks = tokens // DELTA_CHUNK + 2 * batch.num_seqs
    kernels.launch(
        "delta_rule_scores",
        (chunks, value_heads, 1),
        0,
        qkv,
        qkvzba,
        a_log,
        dt_bias,
        *sequences,
        w.a,
        w.p,
        w.g,
        w.beta,
        w.q_scale,
        w.w_scale,
        w.carried,
        batch.num_seqs,
        tokens,
        key_heads,
        value_heads,
        channels,
        qkvzba.shape[1],
    )
    kernels.launch(
        "delta_rule_solve",
        (chunks, value_heads, 1),
        0,
        w.a,
        *sequences,
        batch.num_seqs,
        tokens,
    )
    kernels.launch(
        "delta_rule_products",
        (chunks, value_heads, 1),
        0,
        qkv,
        w.a,
        w.beta,
        w.w_scale,
        *sequences,
        w.w,
        w.u,
        batch.num_seqs,
        tokens,
        key_heads,
        value_heads,
        channels,
    )
    name = "delta_rule_states"
    columns = kernels.constant(name, "SLICE")
    if value_dim // columns * value_heads * batch.num_seqs > kernels.num_multiprocessors:
        name = "delta_rule_states_wide"
        columns = kernels.constant(name, "SLICE")
    kernels.launch(
        name,
        (value_dim // columns, value_heads, batch.num_seqs),
        0,
        qkv,
        w.w,
        w.u,
        w.p,
        w.g,
        w.q_scale,
        w.carried,
        *sequences,
        batch.state_slots,
        batch.initial_slots,
        batch.snapshot_starts,
        batch.snapshot_positions,
        batch.snapshot_slots,
        recurrent_state,
        out,
        tokens,
        key_heads,
        value_heads,
        channels,
    )


def delta_net_decode(
    kernels: Kernels,
    qkvzba: Array,
    conv_weight: Array,
    a_log: Array,
    dt_bias: Array,
    norm_weight: Array,
    eps: float,
    batch: DecodeBatch,
    conv_state: Array,
    recurrent_state: Array,
    out: Array,
) -> None:
    _, value_heads, key_dim, value_dim = recurrent_state.shape
    key_heads = (conv_state.shape[2] - value_heads * value_dim) // (2 * key_dim)
    assert key_dim == value_dim == HEAD
    few = batch.num_rows * value_heads <= 2 * kernels.num_multiprocessors
    kernels.launch(
        "delta_net_decode" if few else "delta_net_decode_many",
        (value_heads, batch.num_rows, 1),
        256,
        qkvzba,
        conv_weight,
        a_log,
        dt_bias,
        norm_weight,
        eps,
        batch.positions,
        batch.state_slots,
        conv_state,
        recurrent_state,
        out,
        key_heads,
        value_heads,
    )
