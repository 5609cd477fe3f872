"""CudaOps: the `Ops` protocol over the modules beside this one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from ...forward_batch import DecodeBatch, PrefillBatch, SampleBatch
from . import attention, delta_net, norm, sampling, token_logprobs
from .gemm import Gemm
from .kernels import Kernels

Array = Any
Empty = Callable[[tuple[int, ...], Any], Array]

ACT = np.dtype(ml_dtypes.bfloat16)
_ROW_THREADS = 128
_SCATTER_THREADS = 128


@dataclass(frozen=True)
class OpsShape:
    """What the ops' own buffers are sized by: model dimensions and the most rows of a step."""

    num_query_heads: int
    num_value_heads: int
    max_decode_rows: int
    max_prefill_tokens: int


class _Workspace:
    """What ops hand over between their own kernels."""

    def __init__(self, shape: OpsShape, empty: Empty) -> None:
        rows = shape.max_decode_rows
        self.decode = attention.DecodeWork(empty, rows, shape.num_query_heads)
        self.prefill = delta_net.PrefillWorkspace(
            empty, ACT, shape.max_prefill_tokens, shape.num_value_heads
        )
        self.sample = sampling.SampleWork(empty, rows)


def workspace_bytes(shape: OpsShape) -> int:
    """Device memory that `CudaOps` of this shape allocates."""
    sizes: list[int] = []
    _Workspace(shape, lambda s, dtype: sizes.append(math.prod(s) * np.dtype(dtype).itemsize))
    return sum(sizes)


class CudaOps:
    """bf16 activations on the current stream. Formulas, shapes and side effects are those of `Ops`.

    `empty(shape, dtype)` allocates the work lists and partial results, once. A decode row whose
    state slot is below 0 is padding: no op reads or writes anything for it but its own outputs.
    """

    def __init__(self, kernels: Kernels, shape: OpsShape, empty: Empty) -> None:
        self._kernels = kernels
        self._gemm = Gemm(kernels)
        self._workspace = _Workspace(shape, empty)

    def embed(self, input_ids: Array, weight: Array, out: Array) -> None:
        self.take_rows(weight, input_ids, out)

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        norm.rms_norm(self._kernels, x, weight, eps, out)

    def add_rms_norm(
        self, branch: Array, residual: Array, weight: Array, eps: float, out: Array
    ) -> None:
        norm.add_rms_norm(self._kernels, branch, residual, weight, eps, out)

    def add_rms_norm_partials(
        self, partials: Array, residual: Array, weight: Array, eps: float, out: Array
    ) -> None:
        norm.add_rms_norm_partials(self._kernels, partials, residual, weight, eps, out)

    def take_rows(self, x: Array, rows: Array, out: Array) -> None:
        size = x.shape[1]
        assert size % 8 == 0
        self._kernels.launch("take_rows", (len(rows), 1, 1), _ROW_THREADS, rows, x, out, size)

    def linear(self, x: Array, weight: Array, out: Array) -> None:
        self._gemm.linear(x, weight, out)

    def linear_decode(self, x: Array, weight: Array, out: Array) -> None:
        self._gemm.linear(x, weight, out)

    def lm_head(self, x: Array, weight: Array, out: Array) -> None:
        self._gemm.linear_fp32(x, weight, out)

    def num_segments(self, n: int, k: int) -> int:
        return self._gemm.num_segments(n, k)

    def linear_partials(self, x: Array, weight: Array, out: Array) -> None:
        self._gemm.linear_partials(x, weight, out)

    def linear_silu_mul(self, x: Array, weight: Array, out: Array) -> None:
        self._gemm.linear_silu_mul(x, weight, out)

    def linear_silu_mul_decode(self, x: Array, weight: Array, out: Array) -> None:
        self._gemm.linear_silu_mul(x, weight, out)

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
            self._kernels,
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
        attention.attention_prefill(
            self._kernels, q, qgkv, k_cache, v_cache, block_tables, batch, out
        )

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
        """After `prepare_decode` of the same batch."""
        attention.attention_decode(
            self._kernels,
            q,
            qgkv,
            k_cache,
            v_cache,
            block_tables,
            batch,
            self._workspace.decode,
            out,
        )

    def causal_conv1d(
        self, qkvzba: Array, weight: Array, batch: PrefillBatch, conv_state: Array, out: Array
    ) -> None:
        delta_net.causal_conv1d(self._kernels, qkvzba, weight, batch, conv_state, out)

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
            self._kernels,
            qkv,
            qkvzba,
            a_log,
            dt_bias,
            batch,
            recurrent_state,
            self._workspace.prefill,
            out,
        )

    def gated_rms_norm(
        self, x: Array, qkvzba: Array, weight: Array, eps: float, out: Array
    ) -> None:
        norm.gated_rms_norm(self._kernels, x, qkvzba, weight, eps, out)

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
            self._kernels,
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
        )

    def prepare_decode(
        self, batch: DecodeBatch, next_ids: Array, block_tables: Array, block_size: int
    ) -> None:
        attention.prepare_decode(
            self._kernels, batch, next_ids, block_tables, block_size, self._workspace.decode
        )

    def scatter(self, values: Array, indices: Array, out: Array) -> None:
        """By size alone: the kernel moves 4 or 8 bytes an item."""
        assert values.dtype == out.dtype and out.dtype.itemsize in (4, 8)
        bits = 8 * out.dtype.itemsize
        self._kernels.launch(
            f"scatter_{bits}",
            (-(-len(indices) // _SCATTER_THREADS), 1, 1),
            _SCATTER_THREADS,
            values.view(f"uint{bits}"),
            indices,
            out.view(f"uint{bits}"),
            len(indices),
        )

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
            self._kernels,
            logits,
            batch,
            next_ids,
            out_ids,
            out_logprobs,
            out_top_ids,
            out_top_logprobs,
            self._workspace.sample,
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
            self._kernels,
            logits,
            target_ids,
            vocab_limit,
            num_top,
            out_logprobs,
            out_ranks,
            out_top_ids,
            out_top_logprobs,
        )
