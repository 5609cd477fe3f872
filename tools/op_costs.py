"""What an op has to move and to compute, for its share of the roofline.

The least traffic that the op's arguments allow: each input read once, each output written once, KV
and states once a sequence. An op that is not listed has no figures.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

CHUNK = 64
Spans = Sequence[tuple[int, int]]
"""Positions start .. end of each sequence in this call."""


class Cost(NamedTuple):
    bytes: float
    flops: float


def op_cost(name: str, args: tuple[Any, ...], spans: Spans) -> Cost | None:
    """`args` as `Ops` declares them."""
    rule = _RULES.get(name)
    return None if rule is None else rule(args, spans)


def op_label(name: str, args: tuple[Any, ...]) -> str:
    """The op's name, with the weight's shape where it is a GEMM."""
    if name.startswith("linear") or name == "lm_head":
        return f"{name} {'x'.join(map(str, args[1].shape))}"
    return name


def _size(*arrays: Any) -> float:
    return float(sum(array.nbytes for array in arrays))


def _gemm(args: tuple[Any, ...], spans: Spans) -> Cost:
    x, weight, out = args
    return Cost(_size(x, weight, out), 2.0 * x.shape[0] * weight.shape[0] * weight.shape[1])


def _embed(args: tuple[Any, ...], spans: Spans) -> Cost:
    return Cost(2 * _size(args[2]), 0)


def _rms_norm(args: tuple[Any, ...], spans: Spans) -> Cost:
    return Cost(_size(args[0], args[3]), 0)


def _add_rms_norm(args: tuple[Any, ...], spans: Spans) -> Cost:
    branch, residual, _, _, out = args
    return Cost(_size(branch, residual, residual, out), 0)


def _qk_norm_rope_write(args: tuple[Any, ...], spans: Spans) -> Cost:
    q_out, k_cache = args[7], args[8]
    heads = q_out.shape[1] + 2 * k_cache.shape[1]
    return Cost(2.0 * q_out.shape[0] * heads * q_out.shape[2] * q_out.dtype.itemsize, 0)


def _attention(args: tuple[Any, ...], spans: Spans) -> Cost:
    q, _, k_cache = args[:3]
    _, heads, dim = q.shape
    context = sum(end for _, end in spans)
    pairs = sum((end * (end + 1) - start * (start + 1)) / 2 for start, end in spans)
    kv = 2.0 * context * k_cache.shape[1] * dim * k_cache.dtype.itemsize
    return Cost(kv + 3 * _size(q), 4.0 * heads * dim * pairs)  # q, gate and out


def _causal_conv1d(args: tuple[Any, ...], spans: Spans) -> Cost:
    return Cost(2 * _size(args[4]), 0)


def _delta_rule_prefill(args: tuple[Any, ...], spans: Spans) -> Cost:
    """FLOPs of the chunked form with full blocks of CHUNK: two products of k with q and k a key
    head; a value head has three with its state, and P u, and the two that apply the inverse."""
    qkv, _, _, _, _, state, out = args
    _, value_heads, key_dim, value_dim = state.shape
    key_heads = (qkv.shape[1] - value_heads * value_dim) // (2 * key_dim)
    block = 2.0 * CHUNK * CHUNK
    by_key_head = 2 * block * key_dim
    by_value_head = (
        3 * 2.0 * CHUNK * key_dim * value_dim + block * (2 * value_dim + key_dim) + block * CHUNK
    )
    chunks = qkv.shape[0] / CHUNK
    states = 2.0 * len(spans) * value_heads * key_dim * value_dim * state.dtype.itemsize
    flops = chunks * (key_heads * by_key_head + value_heads * by_value_head)
    return Cost(_size(qkv, out) + states, flops)


def _gated_rms_norm(args: tuple[Any, ...], spans: Spans) -> Cost:
    return Cost(3 * _size(args[0]), 0)


def _delta_net_decode(args: tuple[Any, ...], spans: Spans) -> Cost:
    qkvzba, state, out = args[0], args[8], args[9]
    states = 2.0 * out.shape[0] * state[0].nbytes
    return Cost(states + _size(qkvzba, out), 0)


def _sample(args: tuple[Any, ...], spans: Spans) -> Cost:
    rows = len(args[1].rows)
    return Cost(float(rows * args[0].shape[1] * args[0].dtype.itemsize), 0)


_RULES: dict[str, Callable[[tuple[Any, ...], Spans], Cost]] = {
    "embed": _embed,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "add_rms_norm_partials": _add_rms_norm,
    "linear": _gemm,
    "linear_decode": _gemm,
    "linear_partials": _gemm,
    "linear_silu_mul": _gemm,
    "linear_silu_mul_decode": _gemm,
    "lm_head": _gemm,
    "qk_norm_rope_write": _qk_norm_rope_write,
    "attention_prefill": _attention,
    "attention_decode": _attention,
    "causal_conv1d": _causal_conv1d,
    "delta_rule_prefill": _delta_rule_prefill,
    "gated_rms_norm": _gated_rms_norm,
    "delta_net_decode": _delta_net_decode,
    "sample": _sample,
}
