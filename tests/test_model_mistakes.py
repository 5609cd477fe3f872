"""Mistakes that are easily made in this model (specification, section 10, last table), injected one
at a time: the comparison with the stored results of transformers must see each, in a prompt and,
where the mistake reaches them, in decode steps.

The comparison is that of test_model_golden: the same ids, rows and tolerance. The table's last
line, another eps in the l2 norm, changes nothing that can be seen, here as there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltaserve.engine.cache import DeltaNetCache
from deltaserve.engine.config import ModelConfig
from deltaserve.engine.models.weights_layout import (
    AttentionWeights,
    DeltaNetWeights,
    LayerWeights,
    ModelWeights,
)
from deltaserve.engine.ops.numpy import attention, delta_net, norm
from deltaserve.engine.ops.numpy.activations import sigmoid
from tests.model_cases import (
    DECODE_START,
    TOLERANCE,
    input_ids,
    load_golden,
    relative_error,
    sketch,
    write_case,
)
from tests.model_harness import ModelHarness, load_case

CASE = "B"  # 3 value heads a key head, 6 query heads a KV head, K != V
SPLIT = 70
STEPS = 8
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[ModelConfig, ModelWeights]:
    directory: Path = tmp_path_factory.mktemp(CASE)
    write_case(CASE, directory)
    return load_case(directory)


def errors(
    config: ModelConfig, weights: ModelWeights, prepare: Callable[[ModelHarness], None]
) -> tuple[float, float]:
    """Relative logit errors of a prompt of 70 + 60 tokens and of the decode steps after it."""
    ids, stored = input_ids(CASE), load_golden(CASE)
    harness = ModelHarness(config, weights, num_slots=1)
    prepare(harness)
    prefill = harness.prefill_in(0, ids, (SPLIT, DECODE_START - SPLIT))
    positions = range(DECODE_START, DECODE_START + STEPS)
    decode = np.concatenate([harness.decode((0, ids[p], p)) for p in positions])
    return (
        relative_error(sketch(prefill), stored["prefill.sketch"][:DECODE_START]),
        relative_error(sketch(decode), stored["decode.sketch"][:STEPS]),
    )


def is_seen(*found: float) -> bool:
    """Far over the tolerance, and a number: the model still computes something plausible."""
    return all(100 * TOLERANCE < error < 10 for error in found)


# ---- mistakes in what the weights mean -------------------------------------------------------


def with_norms(weights: ModelWeights, change: float) -> ModelWeights:
    def mixer(old: AttentionWeights | DeltaNetWeights) -> AttentionWeights | DeltaNetWeights:
        if isinstance(old, DeltaNetWeights):
            return old
        return replace(old, q_norm=old.q_norm + change, k_norm=old.k_norm + change)

    layers = tuple(
        LayerWeights(
            layer.input_norm + change,
            mixer(layer.mixer),
            layer.post_attention_norm + change,
            layer.mlp,
        )
        for layer in weights.layers
    )
    return replace(weights, layers=layers, norm=weights.norm + change)


def with_mixers(
    weights: ModelWeights, kind: type[Any], change: Callable[[Any], Any]
) -> ModelWeights:
    layers = tuple(
        replace(layer, mixer=change(layer.mixer)) if isinstance(layer.mixer, kind) else layer
        for layer in weights.layers
    )
    return replace(weights, layers=layers)


def gated_norm_one_plus_w(config: ModelConfig, weights: ModelWeights) -> ModelWeights:
    return with_mixers(weights, DeltaNetWeights, lambda m: replace(m, norm=m.norm + 1))


def norm_plain_w(config: ModelConfig, weights: ModelWeights) -> ModelWeights:
    return with_norms(weights, -1)


def q_gate_split_in_halves(config: ModelConfig, weights: ModelWeights) -> ModelWeights:
    size = config.num_query_heads * config.head_dim

    def change(mixer: AttentionWeights) -> AttentionWeights:
        packed = mixer.qgkv[: 2 * size].reshape(2, config.num_query_heads, config.head_dim, -1)
        stored = packed.swapaxes(0, 1).reshape(2 * size, -1)  # head by head: query, gate
        return replace(mixer, qgkv=np.concatenate([stored, mixer.qgkv[2 * size :]]))

    return with_mixers(weights, AttentionWeights, change)


def value_head_uses_key_head_modulo(config: ModelConfig, weights: ModelWeights) -> ModelWeights:
    """Value head n in a place whose key head is n % HK."""
    heads, dim, key_heads = config.num_value_heads, config.value_head_dim, config.num_key_heads
    order = np.array(sorted(range(heads), key=lambda n: (n % key_heads, n)))
    values = (order[:, None] * dim + np.arange(dim)).ravel()
    channels, size = config.conv_channels, config.value_size
    first = channels - size
    rows = np.concatenate(
        [
            np.arange(first),
            first + values,
            channels + values,
            channels + size + order,
            channels + size + heads + order,
        ]
    )

    def change(mixer: DeltaNetWeights) -> DeltaNetWeights:
        return DeltaNetWeights(
            qkvzba=np.ascontiguousarray(mixer.qkvzba[rows]),
            conv=np.ascontiguousarray(mixer.conv[rows[:channels]]),
            a_log=mixer.a_log[order],
            dt_bias=mixer.dt_bias[order],
            norm=mixer.norm,
            out=np.ascontiguousarray(mixer.out[:, values]),
        )

    return with_mixers(weights, DeltaNetWeights, change)


def conv_taps_reversed(config: ModelConfig, weights: ModelWeights) -> ModelWeights:
    return with_mixers(
        weights,
        DeltaNetWeights,
        lambda m: replace(m, conv=np.ascontiguousarray(m.conv[:, ::-1])),
    )


WEIGHT_MISTAKES = [
    gated_norm_one_plus_w,
    norm_plain_w,
    q_gate_split_in_halves,
    value_head_uses_key_head_modulo,
    conv_taps_reversed,
]


@pytest.mark.parametrize("mistake", WEIGHT_MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_about_weights_is_seen(
    mistake: Callable[[ModelConfig, ModelWeights], ModelWeights],
    model: tuple[ModelConfig, ModelWeights],
) -> None:
    config, weights = model
    assert is_seen(*errors(config, mistake(config, weights), lambda harness: None))


# ---- mistakes in what an op computes ---------------------------------------------------------


def gate_before_norm(patch: Patch, harness: ModelHarness) -> None:
    def wrong(x: Any, z: Any, weight: Any, eps: float, out: Any, act: Any) -> None:
        gated = x * norm.silu(z)
        np.multiply(gated / norm.root_mean_square(gated, eps), weight, out=out)

    patch.setattr(norm, "gated_rms_norm", wrong)
    patch.setattr(delta_net, "gated_rms_norm", wrong)


def gate_is_sigmoid(patch: Patch, harness: ModelHarness) -> None:
    patch.setattr(norm, "silu", sigmoid)


def rotate_pairs(patch: Patch, pairs: Callable[[int, int], tuple[slice, slice]]) -> None:
    """RoPE over other pairs than (i, i + R/2); `pairs` takes R/2 and D."""

    def wrong(x: Any, cos: Any, sin: Any, act: Any) -> None:
        first, second = pairs(cos.shape[-1], x.shape[-1])
        a, b = x[..., first].copy(), x[..., second].copy()
        x[..., first], x[..., second] = a * cos - b * sin, b * cos + a * sin

    patch.setattr(attention, "_rotate", wrong)


def rope_pairs_interleaved(patch: Patch, harness: ModelHarness) -> None:
    rotate_pairs(patch, lambda half, dim: (slice(0, 2 * half, 2), slice(1, 2 * half, 2)))


def rope_partner_at_half_the_head(patch: Patch, harness: ModelHarness) -> None:
    rotate_pairs(patch, lambda half, dim: (slice(0, half), slice(dim // 2, dim // 2 + half)))


def rope_frequencies_over_head_dim(patch: Patch, harness: ModelHarness) -> None:
    config, inv_freq = harness.config, harness.buffers.inv_freq
    inv_freq[...] = inv_freq ** (config.rotary_dim / config.head_dim)


def scale_heads(patch: Patch, q_scale: float, k_scale: float) -> None:
    right = delta_net._split_heads

    def wrong(*args: Any) -> Any:
        queries_keys, v = right(*args)
        queries_keys[:, 0] *= np.float32(q_scale)
        queries_keys[:, 1] *= np.float32(k_scale)
        return queries_keys, v

    patch.setattr(delta_net, "_split_heads", wrong)


def q_not_scaled(patch: Patch, harness: ModelHarness) -> None:
    scale_heads(patch, harness.config.key_head_dim**0.5, 1)


def k_not_of_length_one(patch: Patch, harness: ModelHarness) -> None:
    scale_heads(patch, 1, 0.9)


def beta_doubled(patch: Patch, harness: ModelHarness) -> None:
    right = delta_net._gates

    def wrong(*args: Any) -> Any:
        beta, decay = right(*args)
        return 2 * beta, decay

    patch.setattr(delta_net, "_gates", wrong)


def decay_after_the_update(patch: Patch, harness: ModelHarness) -> None:
    """Each token decays the state by the gate of the token before it. `carried` has the last gate
    of each layer, told apart by its parameters."""
    right = delta_net._gates
    carried: dict[int, Any] = {}

    def wrong(qkvzba: Any, a_log: Any, *args: Any) -> Any:
        beta, decay = right(qkvzba, a_log, *args)
        before = carried.get(id(a_log), np.zeros_like(decay[:1]))
        carried[id(a_log)] = decay[-1:]
        return beta, np.concatenate([before, decay[:-1]])

    patch.setattr(delta_net, "_gates", wrong)


OP_MISTAKES = [
    gate_before_norm,
    gate_is_sigmoid,
    rope_pairs_interleaved,
    rope_partner_at_half_the_head,
    rope_frequencies_over_head_dim,
    q_not_scaled,
    k_not_of_length_one,
    decay_after_the_update,
    beta_doubled,
]


@pytest.mark.parametrize("mistake", OP_MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_in_an_op_is_seen(
    mistake: Callable[[Patch, ModelHarness], None],
    model: tuple[ModelConfig, ModelWeights],
    monkeypatch: Patch,
) -> None:
    config, weights = model
    assert is_seen(*errors(config, weights, lambda harness: mistake(monkeypatch, harness)))


# ---- mistakes in what is carried from one piece of a prompt to the next ----------------------


@pytest.mark.parametrize("name", ["recurrent_state", "conv_state"])
def test_a_state_that_is_not_carried_is_seen(
    name: str, model: tuple[ModelConfig, ModelWeights]
) -> None:
    ids, stored = input_ids(CASE), load_golden(CASE)["prefill.sketch"][:DECODE_START]
    harness = ModelHarness(*model, num_slots=1)
    first = harness.prefill((0, ids, 0, SPLIT))
    for layer in harness.cache.layers:
        if isinstance(layer, DeltaNetCache):
            getattr(layer, name)[...] = 0
    second = harness.prefill((0, ids, SPLIT, DECODE_START))
    assert relative_error(sketch(first), stored[:SPLIT]) <= TOLERANCE
    assert is_seen(relative_error(sketch(second), stored[SPLIT:]))


def test_without_a_mistake_nothing_is_seen(model: tuple[ModelConfig, ModelWeights]) -> None:
    assert max(errors(*model, lambda harness: None)) <= TOLERANCE
