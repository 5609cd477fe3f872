"""NumpyOps: the `Ops` protocol over the modules beside this one."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...forward_batch import DecodeBatch, PrefillBatch, SampleBatch
from . import attention, delta_net, gemm, norm, sampling, token_logprobs
from .rounding import Act, keep_fp32, round_to_bf16

Array = Any


class NumpyOps:
    """float32 arrays; with `round_bf16` they hold bf16 values wherever the protocol says ">act".

    Formulas, shapes and side effects are those of `Ops`.
    """

    def __init__(self, *, round_bf16: bool = False) -> None:
        self._act: Act = round_to_bf16 if round_bf16 else keep_fp32

    def embed(self, input_ids: Array, weight: Array, out: Array) -> None:
        np.take(weight, input_ids, axis=0, out=out, mode="clip")

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        norm.rms_norm(x, weight, eps, out, self._act)

    def add_rms_norm(
        self, branch: Array, residual: Array, weight: Array, eps: float, out: Array
    ) -> None:
        norm.add_rms_norm(branch, residual, weight, eps, out, self._act)

    def add_rms_norm_partials(
        self, partials: Array, residual: Array, weight: Array, eps: float, out: Array
    ) -> None:
        norm.add_rms_norm_partials(partials, residual, weight, eps, out, self._act)

    def take_rows(self, x: Array, rows: Array, out: Array) -> None:
        np.take(x, rows, axis=0, out=out, mode="clip")

    def linear(self, x: Array, weight: Array, out: Array) -> None:
        gemm.linear_tiles(x, weight, out)
        self._act(out)

    def linear_decode(self, x: Array, weight: Array, out: Array) -> None:
        gemm.linear_rows(x, weight, out)
        self._act(out)

    def lm_head(self, x: Array, weight: Array, out: Array) -> None:
        gemm.linear_rows(x, weight, out)

    def num_segments(self, n: int, k: int) -> int:
        return 1

    def linear_partials(self, x: Array, weight: Array, out: Array) -> None:
        gemm.linear_rows(x, weight, out[0])

    def linear_silu_mul(self, x: Array, weight: Array, out: Array) -> None:
        gemm.linear_silu_mul(x, weight, out, gemm.linear_tiles, self._act)

    def linear_silu_mul_decode(self, x: Array, weight: Array, out: Array) -> None:
        gemm.linear_silu_mul(x, weight, out, gemm.linear_rows, self._act)

    def qk_norm_rope_write(
        self,
        qgkv: Array,
        q_norm: Array,
        k_norm: Array,
        eps: float,
        inv_freq: Array,
        positions: Array,
        slot_mapping: Array,
        q_out: Array,
        k_cache: Array,
        v_cache: Array,
    ) -> None:
        attention.qk_norm_rope_write(
            qgkv,
            q_norm,
            k_norm,
            eps,
            inv_freq,
            positions,
            slot_mapping,
            q_out,
            k_cache,
            v_cache,
            self._act,
        )

    def attention_prefill(
        self,
        q: Array,
        qgkv: Array,
        k_cache: Array,
        v_cache: Array,
        block_tables: Array,
        batch: PrefillBatch,
        out: Array,
    ) -> None:
        attention.attention_prefill(q, qgkv, k_cache, v_cache, block_tables, batch, out, self._act)

    def attention_decode(
        self,
        q: Array,
        qgkv: Array,
        k_cache: Array,
        v_cache: Array,
        block_tables: Array,
        batch: DecodeBatch,
        out: Array,
    ) -> None:
        attention.attention_decode(q, qgkv, k_cache, v_cache, block_tables, batch, out, self._act)

    def causal_conv1d(
        self, qkvzba: Array, weight: Array, batch: PrefillBatch, conv_state: Array, out: Array
    ) -> None:
        delta_net.causal_conv1d(qkvzba, weight, batch, conv_state, out, self._act)

    def delta_rule_prefill(
        self,
        qkv: Array,
        qkvzba: Array,
        a_log: Array,
        dt_bias: Array,
        batch: PrefillBatch,
        recurrent_state: Array,
        out: Array,
    ) -> None:
        delta_net.delta_rule_prefill(
            qkv, qkvzba, a_log, dt_bias, batch, recurrent_state, out, self._act
        )

    def gated_rms_norm(
        self, x: Array, qkvzba: Array, weight: Array, eps: float, out: Array
    ) -> None:
        heads = (len(x), x.shape[1] // len(weight), len(weight))
        end = qkvzba.shape[1] - 2 * heads[1]
        z = qkvzba[:, end - x.shape[1] : end].reshape(heads)
        norm.gated_rms_norm(x.reshape(heads), z, weight, eps, out.reshape(heads), self._act)

    def delta_net_decode(
        self,
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
        delta_net.delta_net_decode(
            qkvzba,
            conv_weight,
            a_log,
            dt_bias,
            norm_weight,
            eps,
            batch,
            conv_state,
            recurrent_state,
            out,
            self._act,
        )

    def prepare_decode(
        self, batch: DecodeBatch, next_ids: Array, block_tables: Array, block_size: int
    ) -> None:
        slots, positions = batch.state_slots, batch.positions
        np.copyto(batch.input_ids, next_ids[slots], where=batch.input_ids < 0)
        blocks = block_tables[slots, positions // block_size]
        batch.slot_mapping[...] = blocks * block_size + positions % block_size

    def scatter(self, values: Array, indices: Array, out: Array) -> None:
        out.reshape(-1)[indices] = values

    def sample(
        self,
        logits: Array,
        batch: SampleBatch,
        next_ids: Array,
        out_ids: Array,
        out_logprobs: Array,
        out_top_ids: Array,
        out_top_logprobs: Array,
    ) -> None:
        sampling.sample(
            logits, batch, next_ids, out_ids, out_logprobs, out_top_ids, out_top_logprobs
        )

    def token_logprobs(
        self,
        logits: Array,
        target_ids: Array,
        vocab_limit: int,
        num_top: int,
        out_logprobs: Array,
        out_ranks: Array,
        out_top_ids: Array,
        out_top_logprobs: Array,
    ) -> None:
        token_logprobs.token_logprobs(
            logits,
            target_ids,
            vocab_limit,
            num_top,
            out_logprobs,
            out_ranks,
            out_top_ids,
            out_top_logprobs,
        )
