"""The Ops protocol: the seam between the model definition and a backend.

Every op is one kernel-sized step. Ops are stateless: caches, index arrays and output buffers are
arguments, and a caller that owns a buffer passes it as `out`. Where the two phases differ there is
one op per phase: every prompt token runs prefill ops, every generated token runs decode ops, which
is half of why a request's result does not depend on what else runs. The other half is that every op
computes a row from that row's own data in an order that is fixed by absolute positions: GEMM rows
do not see the batch, KV tiles and delta-rule chunks are cut at multiples of 64 of the sequence.

Dimensions, used in every docstring below:

    T    tokens of this call          B    sequences (decode: rows) of this call
    H    hidden size                  F    MLP width
    NQ   query heads                  NKV  KV heads             D   their head dim
    HK   linear-attention key heads   HV   its value heads      K,V their head dims
    C    conv channels = 2*HK*K + HV*V
    R    rotary dims                  M,N,KD  rows, outputs and inner size of a GEMM

"act" is the activation type: bf16 on CUDA; on the CPU float32 that holds either full precision or
values rounded to bf16 at the points marked ">act" (spec: "rounding points").

`Array` is numpy.ndarray or cupy.ndarray; the protocol is generic so that model code never names
either. All arrays are C-contiguous unless a docstring says otherwise.
"""

from __future__ import annotations

from typing import Any, Protocol

from ..forward_batch import DecodeBatch, PrefillBatch, SampleBatch

Array = Any

KV_TILE = 64
"""Attention reads KV in tiles cut at absolute multiples of this many positions."""

DELTA_CHUNK = 64
"""The delta rule's chunk grid: absolute multiples of this many positions."""

CONV_RING = 4
"""Rows of the conv state; the row of position t is t % CONV_RING."""


MAX_SEGMENTS = 4
"""The most K segments of `linear_partials`."""


NOT_FINITE, NOTHING_ALLOWED = -1, -2
"""What `Ops.sample` gives as the id of a row whose logits are not all finite, and of one of whose
ids none may be sampled."""


class Ops(Protocol):
    """What a backend computes. Nothing returns a fresh array; everything is written to `out`."""

    # ---- embedding, norms -----------------------------------------------------------------

    def embed(self, input_ids: Array, weight: Array, out: Array) -> None:
        """out[t] = weight[input_ids[t]].  ids int32 [T], weight [vocab, H], out act [T, H]."""

    def rms_norm(self, x: Array, weight: Array, eps: float, out: Array) -> None:
        """out = x / sqrt(mean(x^2) + eps) * (1 + weight), fp32 inside, one rounding >act.

        x, out act [T, H]; weight [H].
        """

    def add_rms_norm(
        self, branch: Array, residual: Array, weight: Array, eps: float, out: Array
    ) -> None:
        """residual += branch (>act), then out = rms_norm(residual).  All act [T, H].

        Writes `residual` in place and `out`.
        """

    def add_rms_norm_partials(
        self, partials: Array, residual: Array, weight: Array, eps: float, out: Array
    ) -> None:
        """branch = partials[0] + partials[1] + ... in that order (fp32, then >act); then as
        `add_rms_norm`.  partials fp32 [S, T, H] from `linear_partials`.
        """

    def take_rows(self, x: Array, rows: Array, out: Array) -> None:
        """out[i] = x[rows[i]].  rows int32 [B], x [T, H], out [B, H]."""

    # ---- GEMM -----------------------------------------------------------------------------

    def linear(self, x: Array, weight: Array, out: Array) -> None:
        """out = x @ weight^T, fp32 accumulation, >act.  Prompt rows.

        x act [M, KD], weight [N, KD], out [M, N]. A row's result does not depend on M.
        """

    def linear_decode(self, x: Array, weight: Array, out: Array) -> None:
        """As `linear`, for decode rows: the order of the sum over KD may be another one."""

    def lm_head(self, x: Array, weight: Array, out: Array) -> None:
        """out = x @ weight^T, fp32 and not rounded.  Both phases, few rows.

        x act [M, H], weight [vocab, H], out fp32 [M, vocab]. A row's result does not depend on M.
        """

    def num_segments(self, n: int, k: int) -> int:
        """How many ordered K segments `linear_partials` writes for a weight [n, k]: 1 to
        MAX_SEGMENTS."""

    def linear_partials(self, x: Array, weight: Array, out: Array) -> None:
        """out[s] = x[:, segment s] @ weight[:, segment s]^T, fp32 [S, M, N], decode only.

        The segments are a constant of (architecture, N, KD), never of M.
        """

    def linear_silu_mul(self, x: Array, weight: Array, out: Array) -> None:
        """out = silu(x @ gate^T >act) (>act) * (x @ up^T >act), >act.

        x act [M, H]; weight [2F, H], gate rows first, then up rows; out act [M, F]. Prompt rows.
        """

    def linear_silu_mul_decode(self, x: Array, weight: Array, out: Array) -> None:
        """As `linear_silu_mul`, for decode rows (see `linear_decode`)."""

    # ---- full attention -------------------------------------------------------------------

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
        """Norms q and k per head ((1+w), >act), rotates the first R dims of each, writes k and v.

        qgkv act [T, (2*NQ + 2*NKV) * D]: all query heads, all gate heads, all key heads, all value
        heads. q_norm, k_norm [D]. inv_freq fp32 [R/2]; angle = position * inv_freq in fp32; pair
        (i, i + R/2). positions, slot_mapping int32 [T]; token t's k (after norm and rotation) and
        raw v go to cache[block, head, offset] with slot = block * block_size + offset.
        q_out act [T, NQ, D]; k_cache, v_cache act [blocks, NKV, block_size, D].
        """

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
        """out = causal_softmax(q k^T / sqrt(D)) v * sigmoid(gate), >act.

        q act [T, NQ, D]; the gate heads are read from qgkv (see `qk_norm_rope_write`).
        Query head j reads KV head j // (NQ // NKV). Row t of sequence b attends to cache positions
        0..positions[t] through block_tables[state_slots[b]] (int32 [slots, max_blocks]); entries
        beyond the context are never read. KV tiles are cut at multiples of KV_TILE. out act
        [T, NQ * D].
        """

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
        """As `attention_prefill` for one row per sequence; row b attends to positions
        0..positions[b]. Splits are cut at absolute positions, their length a function of that
        row's own context alone. q act [B, NQ, D], out act [B, NQ * D].
        """

    # ---- linear attention (gated delta net) -----------------------------------------------

    def causal_conv1d(
        self, qkvzba: Array, weight: Array, batch: PrefillBatch, conv_state: Array, out: Array
    ) -> None:
        """out[t, c] = silu(sum_j weight[c, j] * x[t-3+j, c] >act) >act; x = first C columns.

        qkvzba act [T, C + HV*V + 2*HV]; weight [C, 4], tap 3 is the current token. Rows before the
        call's first token come from conv_state[initial_slots[b]] (zeros where that is -1, and
        before position 0). conv_state act [>= slots, CONV_RING, C]: afterwards conv_state
        [state_slots[b]] holds the last CONV_RING rows (pre-conv values) of each sequence at row
        position % CONV_RING, and the slot of each snapshot those before its position. out act
        [T, C].
        """

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
        """The gated delta rule over each sequence's tokens, chunked at absolute multiples of 64.

        qkv act [T, C] from `causal_conv1d`: q [HK, K], k [HK, K], v [HV, V]; b and a are the last
        2*HV columns of qkvzba. a_log, dt_bias fp32 [HV]. Per token and value head n (key head
        n // (HV // HK)):

            qn = l2norm(q) / sqrt(K), kn = l2norm(k)      (fp32, eps 1e-6 inside the root)
            beta = sigmoid(b), g = -exp(a_log) * softplus(a + dt_bias)
            S = exp(g) * S;  u = beta * (v - S^T kn);  S = S + kn u^T;  o = S^T qn

        recurrent_state fp32 [>= slots, HV, K, V]: S is read from initial_slots[b] (zeros where that
        is -1) and written to state_slots[b], and in mid-call to the slot of each snapshot.
        out act [T, HV * V].
        """

    def gated_rms_norm(
        self, x: Array, qkvzba: Array, weight: Array, eps: float, out: Array
    ) -> None:
        """out = (x / sqrt(mean(x^2) + eps) >act) * weight (>act) * silu(z), >act, per head of V
        dims. Every one of these roundings shows in the logits.

        x, out act [T, HV * V], out may be x; z is columns C .. C + HV*V of qkvzba; weight fp32
        [V] (plain w).
        """

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
        """conv + SiLU + delta rule + gated RMSNorm for one token per row, fused.

        Shapes and formulas of the three ops above. Reads conv rows of positions t-1, t-2, t-3
        (zeros where negative), writes only row t % CONV_RING; reads and writes recurrent_state of
        each row's slot. out act [B, HV * V].
        """

    # ---- a step's head and tail -----------------------------------------------------------

    def prepare_decode(
        self, batch: DecodeBatch, next_ids: Array, block_tables: Array, block_size: int
    ) -> None:
        """Completes a decode batch on the device before the first layer.

        input_ids[b] becomes next_ids[state_slots[b]] where the host passed -1 (the id sampled in
        the previous step, which the host has not read yet); slot_mapping[b] is looked up in
        block_tables. CUDA also builds the attention work list here.
        """

    def scatter(self, values: Array, indices: Array, out: Array) -> None:
        """out.flat[indices[i]] = values[i]: what a step changes in the tables kept by slot.

        values [B] of out's dtype, indices int32 [B], without repeats; out of any shape.
        """

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
        """Samples one id per row and writes it to out_ids[i] and next_ids[state_slots[i]].

        logits fp32 [B, vocab]. Order per row: logprobs are taken of the raw logits; then, if the
        row has features or a mask, penalties, biases and what forbids ids (`LogitAdjustments`);
        then temperature, top-k, top-p, min-p; then one draw keyed by (seed, position).
        temperature 0 is argmax, ties to the smallest id. Ids >= vocab_limit are never sampled.
        out_ids int32 [B]; out_logprobs fp32 [B] the chosen id's; out_top_ids int32,
        out_top_logprobs fp32 [B, 20] the largest, for rows whose num_logprobs >= 0. A row with a
        non-finite raw logit (below vocab_limit) gets NOT_FINITE, one without an id that may be
        sampled NOTHING_ALLOWED. Counts the id in output_counts of rows with PENALTIES.
        """

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
        """The log-probability of target_ids[i] in row i of raw logits, over ids < vocab_limit.

        logits fp32 [N, vocab], target_ids int32 [N]; out_logprobs fp32 [N]; out_ranks int32 [N]:
        how many ids have at least the target's logit, or -1 for a row with a non-finite logit, of
        which nothing else is written. With num_top > 0 also the largest, as `sample` does:
        out_top_ids int32, out_top_logprobs fp32 [N, 20], ties to the smaller id.
        """
