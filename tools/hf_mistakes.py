"""The mistakes that are easily made in this model, made in transformers' model one at a time.

The gate of `hf_parity` compares two models; a mistake in one of them must fail it, and it is the
same to the gate which of the two has it. So they are made in the reference, whose source is Python:
in its weights (of a copy), or in its functions.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from transformers import Qwen3_5ForCausalLM as Model
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling

Patches = contextlib.ExitStack
Mistake = Callable[[Model, Patches], None]
"""Changes the model, or patches functions for as long as the stack is open."""


# ---- in what the weights mean ----------------------------------------------------------------


def _modules(model: Model, kind: type[Any]) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, kind))


def gated_norm_one_plus_w(model: Model, patches: Patches) -> None:
    for norm in _modules(model, modeling.Qwen3_5RMSNormGated):
        norm.weight += 1


def norm_plain_w(model: Model, patches: Patches) -> None:
    for norm in _modules(model, modeling.Qwen3_5RMSNorm):
        norm.weight -= 1


def q_gate_split_in_halves(model: Model, patches: Patches) -> None:
    for attention in _modules(model, modeling.Qwen3_5Attention):
        weight = attention.q_proj.weight
        halves = weight.view(2, -1, attention.head_dim, weight.shape[1])
        weight.copy_(halves.transpose(0, 1).reshape(weight.shape).clone())


def value_head_uses_key_head_modulo(model: Model, patches: Patches) -> None:
    """Value head n in a place whose key head is n % HK; needs more value than key heads."""
    for layer in _modules(model, modeling.Qwen3_5GatedDeltaNet):
        heads, dim = layer.num_v_heads, layer.head_v_dim
        order = torch.tensor(sorted(range(heads), key=lambda n: (n % layer.num_k_heads, n)))
        values = (order[:, None] * dim + torch.arange(dim)).flatten()
        channels = torch.cat([torch.arange(2 * layer.key_dim), 2 * layer.key_dim + values])
        for parameter, rows in (
            (layer.in_proj_qkv.weight, channels),
            (layer.conv1d.weight, channels),
            (layer.in_proj_z.weight, values),
            (layer.in_proj_b.weight, order),
            (layer.in_proj_a.weight, order),
            (layer.A_log, order),
            (layer.dt_bias, order),
        ):
            parameter.copy_(parameter[rows.to(parameter.device)].clone())
        out = layer.out_proj.weight
        out.copy_(out[:, values.to(out.device)].clone())


def conv_taps_reversed(model: Model, patches: Patches) -> None:
    for layer in _modules(model, modeling.Qwen3_5GatedDeltaNet):
        layer.conv1d.weight.copy_(layer.conv1d.weight.flip(-1).clone())


def rope_frequencies_over_head_dim(model: Model, patches: Patches) -> None:
    share = model.config.rope_parameters["partial_rotary_factor"]
    for rope in _modules(model, modeling.Qwen3_5TextRotaryEmbedding):
        rope.inv_freq.copy_(rope.inv_freq**share)


# ---- in what a function computes -------------------------------------------------------------


def _gated_norm(patches: Patches, forward: Callable[..., torch.Tensor]) -> None:
    patches.enter_context(mock.patch.object(modeling.Qwen3_5RMSNormGated, "forward", forward))


def _normed(x: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def gate_before_norm(model: Model, patches: Patches) -> None:
    def forward(norm: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        gated = x.float() * F.silu(gate.float())
        return (norm.weight * _normed(gated, norm.variance_epsilon)).to(x.dtype)

    _gated_norm(patches, forward)


def gate_is_sigmoid(model: Model, patches: Patches) -> None:
    def forward(norm: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        normed = norm.weight * _normed(x.float(), norm.variance_epsilon)
        return (normed * torch.sigmoid(gate.float())).to(x.dtype)

    _gated_norm(patches, forward)


def _rotated_pairs(patches: Patches, pairs: Callable[[int, int], tuple[slice, slice]]) -> None:
    """RoPE over other pairs than (i, i + R/2); `pairs` takes R/2 and D."""

    def wrong(q: Any, k: Any, cos: Any, sin: Any, unsqueeze_dim: int = 1) -> Any:
        half = cos.shape[-1] // 2
        cos, sin = (x.unsqueeze(unsqueeze_dim)[..., :half] for x in (cos, sin))

        def rotate(x: torch.Tensor) -> torch.Tensor:
            first, second = pairs(half, x.shape[-1])
            out = x.clone()
            out[..., first] = x[..., first] * cos - x[..., second] * sin
            out[..., second] = x[..., second] * cos + x[..., first] * sin
            return out

        return rotate(q), rotate(k)

    patches.enter_context(mock.patch.object(modeling, "apply_rotary_pos_emb", wrong))


def rope_pairs_interleaved(model: Model, patches: Patches) -> None:
    _rotated_pairs(patches, lambda half, dim: (slice(0, 2 * half, 2), slice(1, 2 * half, 2)))


def rope_partner_at_half_the_head(model: Model, patches: Patches) -> None:
    _rotated_pairs(patches, lambda half, dim: (slice(0, half), slice(dim // 2, dim // 2 + half)))


def _delta_rule(patches: Patches, change: Callable[[dict[str, Any]], None]) -> None:
    """`change` edits the arguments of both forms of the delta rule."""

    def wrap(name: str) -> None:
        right = getattr(modeling, name)

        def wrong(query: Any, key: Any, value: Any, **options: Any) -> Any:
            arguments = {"query": query, "key": key, "value": value, **options}
            change(arguments)
            return right(**arguments)

        patches.enter_context(mock.patch.object(modeling, name, wrong))

    wrap("torch_chunk_gated_delta_rule")
    wrap("torch_recurrent_gated_delta_rule")


def _scaled_heads(patches: Patches, q_scale: float, k_scale: float) -> None:
    def change(arguments: dict[str, Any]) -> None:
        arguments["use_qk_l2norm_in_kernel"] = False
        for name, scale in (("query", q_scale), ("key", k_scale)):
            normed = modeling.l2norm(arguments[name].float())
            arguments[name] = (scale * normed).to(arguments[name].dtype)

    _delta_rule(patches, change)


def q_not_scaled(model: Model, patches: Patches) -> None:
    _scaled_heads(patches, model.config.linear_key_head_dim**0.5, 1.0)


def k_not_of_length_one(model: Model, patches: Patches) -> None:
    _scaled_heads(patches, 1.0, 0.9)


def beta_doubled(model: Model, patches: Patches) -> None:
    _delta_rule(patches, lambda arguments: arguments.update(beta=2 * arguments["beta"]))


def decay_after_the_update(model: Model, patches: Patches) -> None:
    """Each token decays the state by the gate of the token before it, which a layer keeps from
    call to call; layers are called in order."""
    layers = model.config.layer_types.count("linear_attention")
    carried: dict[int, torch.Tensor] = {}
    calls = 0

    def change(arguments: dict[str, Any]) -> None:
        nonlocal calls
        layer, calls = calls % layers, calls + 1
        gates = arguments["g"]
        first = arguments["initial_state"] is None
        before = torch.zeros_like(gates[:, :1]) if first else carried[layer]
        carried[layer] = gates[:, -1:]
        arguments["g"] = torch.cat([before, gates[:, :-1]], dim=1)

    _delta_rule(patches, change)


# ---- in what is carried from one call to the next --------------------------------------------


def recurrent_state_not_carried(model: Model, patches: Patches) -> None:
    _delta_rule(patches, lambda arguments: arguments.update(initial_state=None))


def conv_state_not_carried(model: Model, patches: Patches) -> None:
    right = modeling.causal_conv1d_update

    def wrong(x: torch.Tensor, conv_state: torch.Tensor, *args: Any) -> torch.Tensor:
        conv_state.zero_()
        return right(x, conv_state, *args)

    patches.enter_context(mock.patch.object(modeling, "causal_conv1d_update", wrong))


MISTAKES: tuple[Mistake, ...] = (
    gated_norm_one_plus_w,
    norm_plain_w,
    q_gate_split_in_halves,
    value_head_uses_key_head_modulo,
    conv_taps_reversed,
    gate_before_norm,
    gate_is_sigmoid,
    rope_pairs_interleaved,
    rope_partner_at_half_the_head,
    rope_frequencies_over_head_dim,
    q_not_scaled,
    k_not_of_length_one,
    decay_after_the_update,
    beta_doubled,
    recurrent_state_not_carried,
    conv_state_not_carried,
)


def mistakes_for(model: Model) -> tuple[Mistake, ...]:
    """Those that change this model: with a value head a key head, n % HK is right."""
    config = model.config
    if config.linear_num_value_heads > config.linear_num_key_heads:
        return MISTAKES
    return tuple(m for m in MISTAKES if m is not value_head_uses_key_head_modulo)


@contextlib.contextmanager
def made(mistake: Mistake, wrong: Model, right: Model) -> Iterator[Model]:
    """`wrong`, a copy of `right`, with the mistake; afterwards a copy again."""
    with contextlib.ExitStack() as patches, torch.no_grad():
        mistake(wrong, patches)
        try:
            yield wrong
        finally:
            for target, source in (
                *zip(wrong.parameters(), right.parameters(), strict=True),
                *zip(wrong.buffers(), right.buffers(), strict=True),
            ):
                target.copy_(source)
