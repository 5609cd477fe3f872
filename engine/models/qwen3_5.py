"""The Qwen3.5 text model: one definition over `Ops`, for every backend.

    residual --norm--> mixer --+--norm--> MLP --+--> ... --norm--> lm_head

Each addition to the residual stream is fused with the norm that follows it. Prompt tokens run
`prefill`, generated tokens `decode`; both read and write the caches. Nothing is allocated here
after construction.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..cache import AttentionCache, Cache, DeltaNetCache
from ..config import ModelConfig
from ..forward_batch import DecodeBatch, PrefillBatch
from ..ops.base import Ops
from .attention import attention_decode, attention_prefill
from .buffers import Buffers, allocate_buffers, views
from .gated_delta_net import delta_net_decode, delta_net_prefill
from .mlp import mlp_decode, mlp_prefill
from .weights_layout import AttentionWeights, DeltaNetWeights, ModelWeights

Array = Any

__all__ = ["Buffers", "Qwen35Model", "allocate_buffers"]


class Qwen35Model:
    """`buffers` are `allocate_buffers` of the same config and device."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        ops: Ops,
        cache: Cache,
        buffers: Buffers,
    ) -> None:
        assert len(weights.layers) == len(cache.layers) == config.num_layers
        self._config = config
        self._weights = weights
        self._ops = ops
        self._cache = cache
        self._buffers = buffers
        self._block_size = next(
            (layer.k.shape[2] for layer in cache.layers if isinstance(layer, AttentionCache)), 1
        )

    def decode(self, batch: DecodeBatch, logits_out: Array) -> None:
        """Feeds one generated token per row; logits_out fp32 [B, vocab]."""
        ops, weights, buffers, cache = self._ops, self._weights, self._buffers, self._cache
        eps, count = self._config.rms_norm_eps, batch.num_rows
        residual, hidden = buffers.residual[:count], buffers.hidden[:count]
        partials = None
        ops.prepare_decode(batch, cache.next_ids, cache.block_tables, self._block_size)
        ops.embed(batch.input_ids, weights.embed, residual)
        for layer, layer_cache in zip(weights.layers, cache.layers, strict=True):
            if partials is None:
                ops.rms_norm(residual, layer.input_norm, eps, hidden)
            else:
                ops.add_rms_norm_partials(partials, residual, layer.input_norm, eps, hidden)
            partials = self._partials(count, layer.mixer.out)
            self._mixer_decode(layer.mixer, layer_cache, batch, hidden, partials)
            ops.add_rms_norm_partials(partials, residual, layer.post_attention_norm, eps, hidden)
            partials = self._partials(count, layer.mlp.down)
            mlp_decode(layer.mlp, ops, buffers, hidden, partials)
        assert partials is not None
        ops.add_rms_norm_partials(partials, residual, weights.norm, eps, hidden)
        ops.lm_head(hidden, weights.lm_head, logits_out)

    def prefill(
        self,
        batch: PrefillBatch,
        logits_out: Array,
        before_logits: Callable[[], None] | None = None,
    ) -> None:
        """Runs prompt tokens; logits_out fp32 [len(batch.logits_rows), vocab].

        `before_logits` is called when all layers are done: it may call `prompt_logits`, also into
        what becomes logits_out.
        """
        ops, weights, buffers, cache = self._ops, self._weights, self._buffers, self._cache
        eps, tokens = self._config.rms_norm_eps, batch.num_tokens
        residual, hidden = buffers.residual[:tokens], buffers.hidden[:tokens]
        branch = buffers.branch[:tokens]
        ops.embed(batch.input_ids, weights.embed, residual)
        for index, (layer, layer_cache) in enumerate(
            zip(weights.layers, cache.layers, strict=True)
        ):
            if index == 0:
                ops.rms_norm(residual, layer.input_norm, eps, hidden)
            else:
                ops.add_rms_norm(branch, residual, layer.input_norm, eps, hidden)
            self._mixer_prefill(layer.mixer, layer_cache, batch, hidden, branch)
            ops.add_rms_norm(branch, residual, layer.post_attention_norm, eps, hidden)
            mlp_prefill(layer.mlp, ops, buffers, hidden, branch)
        if before_logits is None and len(batch.logits_rows) == 0:
            return
        ops.add_rms_norm(branch, residual, weights.norm, eps, hidden)
        if before_logits is not None:
            before_logits()
        if len(batch.logits_rows) > 0:
            self.prompt_logits(batch.logits_rows, logits_out)

    def prompt_logits(self, rows: Array, logits_out: Array) -> None:
        """The logits fp32 [B, vocab] of token rows int32 [B] of the prefill pass that is ending."""
        hidden = self._buffers.branch[: len(rows)]
        self._ops.take_rows(self._buffers.hidden, rows, hidden)
        self._ops.lm_head(hidden, self._weights.lm_head, logits_out)

    def _partials(self, count: int, weight: Array) -> Array:
        """The buffer that `linear_partials` of a weight [H, KD] writes, [S, B, H]."""
        segments = self._ops.num_segments(*weight.shape)
        return views(self._buffers.partials, (segments, count, weight.shape[0]))[0]

    def _mixer_decode(
        self,
        mixer: AttentionWeights | DeltaNetWeights,
        cache: AttentionCache | DeltaNetCache,
        batch: DecodeBatch,
        hidden: Array,
        partials: Array,
    ) -> None:
        config, ops, buffers = self._config, self._ops, self._buffers
        if isinstance(mixer, AttentionWeights):
            assert isinstance(cache, AttentionCache)
            tables = self._cache.block_tables
            attention_decode(config, mixer, ops, cache, tables, buffers, batch, hidden, partials)
        else:
            assert isinstance(cache, DeltaNetCache)
            delta_net_decode(config, mixer, ops, cache, buffers, batch, hidden, partials)

    def _mixer_prefill(
        self,
        mixer: AttentionWeights | DeltaNetWeights,
        cache: AttentionCache | DeltaNetCache,
        batch: PrefillBatch,
        hidden: Array,
        out: Array,
    ) -> None:
        config, ops, buffers = self._config, self._ops, self._buffers
        if isinstance(mixer, AttentionWeights):
            assert isinstance(cache, AttentionCache)
            tables = self._cache.block_tables
            attention_prefill(config, mixer, ops, cache, tables, buffers, batch, hidden, out)
        else:
            assert isinstance(cache, DeltaNetCache)
            delta_net_prefill(config, mixer, ops, cache, buffers, batch, hidden, out)
