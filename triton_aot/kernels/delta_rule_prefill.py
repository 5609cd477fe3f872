"""The gated delta rule over prompt tokens, in chunks of 64 cut at absolute positions.

Per value head n (key head n // rep) and chunk, with G the running sum of g within the chunk and S
the state that comes in (spec section 4.2):

    D_ij = exp(G_i - G_j) for j <= i, else 0
    A_ij = beta_i (k_i . k_j) D_ij for j < i, else 0;   T = (I + A)^-1
    U = T (beta v),  W = T (beta exp(G) k),  P = (q k^T) * D
    V' = U - W S;   o = exp(G) (q S) + P V';   S = exp(G_last) S + k^T (exp(G_last - G) V')

    delta_rule_chunks_kernel    all chunks at once: everything that does not need S
    delta_rule_states_kernel    chunk after chunk: V', o, S, for one slice of the value dims

A call may start or end within a chunk: rows that are not there have q = k = v = 0, beta = 0 and
g = 0, with which the formulas leave S alone. The last chunk's part of a split prompt then starts
from S at the split, which gives the same result up to rounding; splits at multiples of 64 give the
same bits.

fp32: gates, G, D, A, T and S; T's products with beta v and beta exp(G) k are tf32. Between the
kernels q, k (normalised), U, W, P and as operands of the tensor core S and V' are act.

Workspace, all [T, ...]: q_norm, k_norm act [T, HK, K]; W act [T, HV, K]; U act [T, HV, V]; P act
[T, HV, 64]; G fp32 [T, HV].
Check: tests/test_triton_delta_rule.py (interpreter), tools/gpu_check.py --only delta_rule.
"""

import triton
import triton.language as tl

from .varlen import sequence_of_tile

CHUNK = tl.constexpr(64)
SOLVE = tl.constexpr(16)  # rows of the diagonal blocks that are solved row by row


@triton.jit
def l2_normalise(x, scale):
    x = x.to(tl.float32)
    return x * (scale / tl.sqrt(tl.sum(x * x, 1) + 1e-6))[:, None]


@triton.jit
def merge_inverses(inverse, a, PAIRS: tl.constexpr, N: tl.constexpr):
    """Inverses [2 * PAIRS, N, N] of the diagonal blocks of I + a -> [PAIRS, 2 N, 2 N], with the
    block below the diagonal of each pair: -inverse_1 a_10 inverse_0."""
    pair = tl.arange(0, PAIRS)
    same = pair[:, None, None, None, None, None] == pair[None, None, None, :, None, None]
    parts = tl.reshape(a, (PAIRS, 2, N, PAIRS, 2, N))
    parts = tl.sum(tl.where(same, parts, 0.0), 3)  # [pair, half, N, half, N]
    left, _ = tl.split(tl.permute(parts, (0, 1, 2, 4, 3)))
    _, below = tl.split(tl.permute(left, (0, 2, 3, 1)))  # [pair, N, N]
    halves = tl.permute(tl.reshape(inverse, (PAIRS, 2, N, N)), (0, 2, 3, 1))
    first, second = tl.split(halves)
    if PAIRS == 1:
        first_square = tl.reshape(first, (N, N))
        product = tl.dot(
            tl.reshape(second, (N, N)), tl.reshape(below, (N, N)), input_precision="tf32x3"
        )
        product = tl.dot(product, first_square, input_precision="tf32x3")
        product = tl.reshape(product, (PAIRS, N, N))
    else:
        product = tl.dot(second, below, input_precision="tf32x3")
        product = tl.dot(product, first, input_precision="tf32x3")
    rows = tl.join(tl.join(first, tl.zeros_like(first)), tl.join(-product, second))
    return tl.reshape(tl.permute(rows, (0, 4, 1, 3, 2)), (PAIRS, 2 * N, 2 * N))


@triton.jit
def invert_unit_lower(a):
    """(I + a)^-1 of a strictly lower triangular fp32 [64, 64]: its diagonal 16 x 16 blocks by
    forward substitution, row i from the rows before it, then joined to 32 and to 64."""
    BLOCKS: tl.constexpr = CHUNK // SOLVE
    block = tl.arange(0, BLOCKS)
    row = tl.arange(0, SOLVE)
    on_diagonal = block[:, None, None, None] == block[None, None, :, None]
    parts = tl.reshape(a, (BLOCKS, SOLVE, BLOCKS, SOLVE))
    diagonal = tl.sum(tl.where(on_diagonal, parts, 0.0), 2)  # [BLOCKS, SOLVE, SOLVE]
    inverse = tl.where((row[:, None] == row[None, :])[None, :, :], 1.0, 0.0)
    inverse = tl.broadcast_to(inverse, (BLOCKS, SOLVE, SOLVE))
    for i in range(1, SOLVE):
        here = (row == i)[None, :, None]
        factors = tl.sum(tl.where(here, diagonal, 0.0), 1)  # a[i, :] of each block
        solved = -tl.sum(factors[:, :, None] * inverse, 1)
        solved = tl.where((row == i)[None, :], 1.0, solved)
        inverse = tl.where(here, solved[:, None, :], inverse)
    inverse = merge_inverses(inverse, a, BLOCKS // 2, SOLVE)
    inverse = merge_inverses(inverse, a, BLOCKS // 4, SOLVE * 2)
    return tl.reshape(inverse, (CHUNK, CHUNK))


@triton.jit
def delta_rule_chunks_kernel(
    qkv,
    qkvzba,
    a_log,
    dt_bias,
    cu_seqlens,
    start_positions,
    q_norm,
    k_norm,
    w_out,
    u_out,
    p_out,
    g_out,
    NUM_SEQS,
    HK,
    HV,
    QKV_SIZE,
    PROJECTION_SIZE,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """Grid (T // 64 + 2 B, HV)."""
    b, chunk = sequence_of_tile(cu_seqlens, NUM_SEQS, tl.program_id(0), CHUNK, 2)
    n = tl.program_id(1)
    begin = tl.load(cu_seqlens + b)
    end = tl.load(cu_seqlens + b + 1)
    first = begin + chunk * CHUNK - tl.load(start_positions + b) % CHUNK
    if first >= end:
        return
    rep = HV // HK
    key_head = n // rep
    i = tl.arange(0, CHUNK)
    t = first + i
    present = (t >= begin) & (t < end)
    here = present[:, None]
    t = tl.where(present, t, begin).to(tl.int64)
    kd = tl.arange(0, K)[None, :]
    vd = tl.arange(0, V)[None, :]
    act: tl.constexpr = u_out.dtype.element_ty

    row = qkv + (t * QKV_SIZE)[:, None]
    q = tl.load(row + key_head * K + kd, mask=here, other=0.0)
    k = tl.load(row + (HK + key_head) * K + kd, mask=here, other=0.0)
    q = l2_normalise(q, 1.0 / K**0.5).to(act)
    k = l2_normalise(k, 1.0).to(act)
    if n % rep == 0:
        at = (t * HK + key_head)[:, None] * K + kd
        tl.store(q_norm + at, q, mask=here)
        tl.store(k_norm + at, k, mask=here)

    gates = qkvzba + t * PROJECTION_SIZE + (PROJECTION_SIZE - 2 * HV + n)
    beta = tl.load(gates, mask=present, other=0.0).to(tl.float32)
    beta = (1.0 / (1.0 + tl.exp(-beta))).to(act).to(tl.float32)
    beta = tl.where(present, beta, 0.0)
    x = tl.load(gates + HV, mask=present, other=0.0).to(tl.float32) + tl.load(dt_bias + n)
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    decay = -tl.exp(tl.load(a_log + n)) * softplus
    g = tl.cumsum(tl.where(present, decay, 0.0), 0)
    tl.store(g_out + t * HV + n, g, mask=present)

    lower = i[:, None] >= i[None, :]
    d = tl.exp(tl.where(lower, g[:, None] - g[None, :], float("-inf")))
    scores = tl.dot(q, k.T) * d
    tl.store(p_out + (t * HV + n)[:, None] * CHUNK + i[None, :], scores.to(act), mask=here)
    a = tl.where(i[:, None] > i[None, :], tl.dot(k, k.T) * d * beta[:, None], 0.0)
    inverse = invert_unit_lower(a)

    v = tl.load(row + 2 * HK * K + n * V + vd, mask=here, other=0.0).to(tl.float32)
    u = tl.dot(inverse, v * beta[:, None], input_precision="tf32")
    tl.store(u_out + (t * HV + n)[:, None] * V + vd, u.to(act), mask=here)
    w = tl.dot(inverse, k.to(tl.float32) * (beta * tl.exp(g))[:, None], input_precision="tf32")
    tl.store(w_out + (t * HV + n)[:, None] * K + kd, w.to(act), mask=here)


@triton.jit
def delta_rule_states_kernel(
    q_norm,
    k_norm,
    w_in,
    u_in,
    p_in,
    g_in,
    cu_seqlens,
    start_positions,
    state_slots,
    recurrent_state,
    out,
    HK,
    HV,
    K: tl.constexpr,
    V: tl.constexpr,
    SLICE: tl.constexpr,
):
    """Grid (V // SLICE, HV, B)."""
    n = tl.program_id(1)
    b = tl.program_id(2)
    begin = tl.load(cu_seqlens + b)
    end = tl.load(cu_seqlens + b + 1)
    start = tl.load(start_positions + b)
    key_head = n // (HV // HK)
    i = tl.arange(0, CHUNK)
    kd = tl.arange(0, K)
    vd = tl.program_id(0) * SLICE + tl.arange(0, SLICE)
    act: tl.constexpr = out.dtype.element_ty

    slot = tl.load(state_slots + b).to(tl.int64)
    state = recurrent_state + (slot * HV + n) * K * V + kd[:, None] * V + vd[None, :]
    s = tl.zeros((K, SLICE), tl.float32)
    if start > 0:
        s = tl.load(state)
    for first in range(begin - start % CHUNK, end, CHUNK):
        t = first + i
        present = (t >= begin) & (t < end)
        here = present[:, None]
        t = t.to(tl.int64)
        value_rows = (t * HV + n)[:, None]
        key_rows = (t * HK + key_head)[:, None]
        w = tl.load(w_in + value_rows * K + kd[None, :], mask=here, other=0.0)
        u = tl.load(u_in + value_rows * V + vd[None, :], mask=here, other=0.0)
        q = tl.load(q_norm + key_rows * K + kd[None, :], mask=here, other=0.0)
        k = tl.load(k_norm + key_rows * K + kd[None, :], mask=here, other=0.0)
        p = tl.load(p_in + value_rows * CHUNK + i[None, :], mask=here, other=0.0)
        g_last = tl.load(g_in + (tl.minimum(first + CHUNK, end) - 1).to(tl.int64) * HV + n)
        g = tl.load(g_in + t * HV + n, mask=present, other=0.0)
        s_act = s.to(act)
        v_new = u.to(tl.float32) - tl.dot(w, s_act)
        o = tl.dot(q, s_act) * tl.exp(g)[:, None]
        o = tl.dot(p, v_new.to(act), o)
        tl.store(out + value_rows * V + vd[None, :], o.to(act), mask=here)
        # rows that are not there: g = 0 may be far above g_last, but their v_new is 0
        carried = tl.where(present, tl.exp(tl.minimum(g_last - g, 0.0)), 0.0)
        s = tl.dot(k.T, (v_new * carried[:, None]).to(act), s * tl.exp(g_last))
    tl.store(state, s)
