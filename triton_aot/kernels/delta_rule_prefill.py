"""The gated delta rule over prompt tokens, in chunks of 64 cut at absolute positions.

Per value head n (key head n // rep) and chunk, with G the running sum of g within the chunk and S
the state that comes in (spec section 4.2):

    D_ij = exp(G_i - G_j) for j <= i, else 0
    A_ij = beta_i (k_i . k_j) D_ij for j < i, else 0;   T = (I + A)^-1
    U = T (beta v),  W = T (beta exp(G) k),  P = (q k^T) * D
    V' = U - W S;   o = exp(G) (q S) + P V';   S = exp(G_last) S + k^T (exp(G_last - G) V')

    delta_rule_scores_kernel    a program a chunk and key head: G, A and P of its value heads
    delta_rule_solve_kernel     a program a chunk and value head: T
    delta_rule_products_kernel  a program a chunk and value head: U and W
    delta_rule_states_kernel    chunk after chunk: V', o, S, for one slice of the value dims

A call may start or end within a chunk: rows that are not there have q = k = v = 0, beta = 0 and
g = 0, with which the formulas leave S alone. The last chunk's part of a split prompt then starts
from S at the split, which gives the same result up to rounding; splits at multiples of 64 give the
same bits.

fp32: gates, G, D, A, T and S; T's products with beta v and beta exp(G) k are tf32. Between the
kernels q, k (normalised), U, W, P and as operands of the tensor core S and V' are act.

Workspace, all [T, ...]: q_norm, k_norm act [T, HK, K]; W act [T, HV, K]; U act [T, HV, V]; P act
[T, HV, 64]; A, then T, fp32 [T, HV, 64]; G and beta fp32 [T, HV].
Check: tests/test_triton_delta_rule.py (interpreter), tools/gpu_check.py --only delta_rule.
"""

import triton
import triton.language as tl

from .varlen import sequence_of_tile

CHUNK = tl.constexpr(64)
HALF = tl.constexpr(32)
NO_TOKEN = tl.constexpr(2**31 - 1)
SOLVE = tl.constexpr(16)  # rows of the diagonal blocks that are solved row by row


@triton.jit
def l2_normalise(x, scale):
    x = x.to(tl.float32)
    return x * (scale / tl.sqrt(tl.sum(x * x, 1) + 1e-6))[:, None]


@triton.jit
def invert_diagonal_blocks(a_rows, HV, first, begin, end):
    """Inverses of the four 16 x 16 diagonal blocks of I + A by forward substitution, one column a
    thread: two [32, 32] tiles, each with two of them on its diagonal and zeros elsewhere.
    `a_rows`: this head's A, of the (possibly absent) token `first`."""
    column = tl.arange(0, CHUNK)  # of A; its block's rows are solved
    block = column // SOLVE * SOLVE
    rows = ()
    for i in tl.static_range(SOLVE):
        t = first + block + i
        present = (t >= begin) & (t < end)
        row = a_rows + (block + i).to(tl.int64) * (HV * CHUNK) + block
        x = tl.where(column - block == i, 1.0, 0.0)
        for j in tl.static_range(i):
            x -= tl.load(row + j, mask=present, other=0.0) * rows[j]
        rows = rows + (x,)  # noqa: RUF005 (Triton has no starred expressions)
    for level in tl.static_range(4):  # new last dims: bits of the row, high bit first
        joined = ()
        for i in tl.static_range(SOLVE >> (level + 1)):
            pair = tl.join(rows[i], rows[i + (SOLVE >> (level + 1))])
            joined = joined + (pair,)  # noqa: RUF005
        rows = joined
    solved = tl.reshape(rows[0], (CHUNK, 1, SOLVE))  # [column, 1, row in block]
    own = tl.arange(0, 2)[None, :, None] == (column // SOLVE % 2)[:, None, None]
    tiles = tl.reshape(tl.where(own, solved, 0.0), (2, HALF, HALF))  # [half, column, row]
    return tl.split(tl.permute(tiles, (2, 1, 0)))


@triton.jit
def join_blocks(blocks, a):
    """Inverse of I + a [32, 32] from those of its two diagonal blocks."""
    i = tl.arange(0, HALF)
    below = (i >= SOLVE)[:, None] & (i < SOLVE)[None, :]
    product = tl.dot(blocks, tl.where(below, a, 0.0), input_precision="tf32x3")
    return blocks - tl.dot(product, blocks, input_precision="tf32x3")


@triton.jit
def delta_rule_scores_kernel(
    qkv,
    qkvzba,
    a_log,
    dt_bias,
    cu_seqlens,
    start_positions,
    q_norm,
    k_norm,
    a_out,
    p_out,
    g_out,
    beta_out,
    NUM_SEQS,
    HK,
    HV,
    QKV_SIZE,
    PROJECTION_SIZE,
    K: tl.constexpr,
):
    """Grid (T // 64 + 2 B, HK)."""
    b, chunk = sequence_of_tile(cu_seqlens, NUM_SEQS, tl.program_id(0), CHUNK, 2)
    key_head = tl.program_id(1)
    begin = tl.load(cu_seqlens + b)
    end = tl.load(cu_seqlens + b + 1)
    first = begin + chunk * CHUNK - tl.load(start_positions + b) % CHUNK
    if first >= end:
        return
    rep = HV // HK
    i = tl.arange(0, CHUNK)
    t = first + i
    present = (t >= begin) & (t < end)
    here = present[:, None]
    t = tl.where(present, t, begin).to(tl.int64)
    kd = tl.arange(0, K)[None, :]
    act: tl.constexpr = p_out.dtype.element_ty

    row = qkv + (t * QKV_SIZE)[:, None]
    q = tl.load(row + key_head * K + kd, mask=here, other=0.0)
    k = tl.load(row + (HK + key_head) * K + kd, mask=here, other=0.0)
    q = l2_normalise(q, 1.0 / K**0.5).to(act)
    k = l2_normalise(k, 1.0).to(act)
    at = (t * HK + key_head)[:, None] * K + kd
    tl.store(q_norm + at, q, mask=here)
    tl.store(k_norm + at, k, mask=here)
    qk = tl.dot(q, k.T)
    kk = tl.dot(k, k.T)

    lower = i[:, None] >= i[None, :]
    for n in range(key_head * rep, key_head * rep + rep):
        gates = qkvzba + t * PROJECTION_SIZE + (PROJECTION_SIZE - 2 * HV + n)
        beta = tl.load(gates, mask=present, other=0.0).to(tl.float32)
        beta = (1.0 / (1.0 + tl.exp(-beta))).to(act).to(tl.float32)
        beta = tl.where(present, beta, 0.0)
        x = tl.load(gates + HV, mask=present, other=0.0).to(tl.float32) + tl.load(dt_bias + n)
        softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
        decay = -tl.exp(tl.load(a_log + n)) * softplus
        g = tl.cumsum(tl.where(present, decay, 0.0), 0)
        tl.store(g_out + t * HV + n, g, mask=present)
        tl.store(beta_out + t * HV + n, beta, mask=present)
        d = tl.exp(tl.where(lower, g[:, None] - g[None, :], float("-inf")))
        pair = (t * HV + n)[:, None] * CHUNK + i[None, :]
        tl.store(p_out + pair, (qk * d).to(act), mask=here)
        a = tl.where(i[:, None] > i[None, :], kk * d * beta[:, None], 0.0)
        tl.store(a_out + pair, a, mask=here)


@triton.jit
def delta_rule_solve_kernel(a_and_t, cu_seqlens, start_positions, NUM_SEQS, HV):
    """A -> T in place, T = [[T0, 0], [T10, T1]] in tiles of 32. Grid (T // 64 + 2 B, HV)."""
    b, chunk = sequence_of_tile(cu_seqlens, NUM_SEQS, tl.program_id(0), CHUNK, 2)
    n = tl.program_id(1)
    begin = tl.load(cu_seqlens + b)
    end = tl.load(cu_seqlens + b + 1)
    first = begin + chunk * CHUNK - tl.load(start_positions + b) % CHUNK
    if first >= end:
        return
    i = tl.arange(0, HALF)
    t = first + i
    here0 = ((t >= begin) & (t < end))[:, None]
    here1 = ((t + HALF >= begin) & (t + HALF < end))[:, None]
    rows = a_and_t + (first.to(tl.int64) * HV + n) * CHUNK
    tile0 = rows + i.to(tl.int64)[:, None] * (HV * CHUNK) + i[None, :]
    tile1 = tile0 + HV * (CHUNK * HALF)
    blocks0, blocks1 = invert_diagonal_blocks(rows, HV, first, begin, end)
    inverse0 = join_blocks(blocks0, tl.load(tile0, mask=here0, other=0.0))
    inverse1 = join_blocks(blocks1, tl.load(tile1 + HALF, mask=here1, other=0.0))
    a10 = tl.load(tile1, mask=here1, other=0.0)
    product = tl.dot(inverse1, a10, input_precision="tf32x3")
    inverse10 = -tl.dot(product, inverse0, input_precision="tf32x3")
    tl.debug_barrier()  # every thread has read its part of A
    tl.store(tile0, inverse0, mask=here0)
    tl.store(tile1, inverse10, mask=here1)
    tl.store(tile1 + HALF, inverse1, mask=here1)


@triton.jit
def delta_rule_products_kernel(
    qkv,
    k_norm,
    t_in,
    g_in,
    beta_in,
    cu_seqlens,
    start_positions,
    w_out,
    u_out,
    NUM_SEQS,
    HK,
    HV,
    QKV_SIZE,
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
    key_head = n // (HV // HK)
    i = tl.arange(0, CHUNK)
    t = first + i
    present = (t >= begin) & (t < end)
    here = present[:, None]
    t = tl.where(present, t, begin).to(tl.int64)
    kd = tl.arange(0, K)[None, :]
    vd = tl.arange(0, V)[None, :]
    act: tl.constexpr = u_out.dtype.element_ty
    inverse = tl.load(t_in + (t * HV + n)[:, None] * CHUNK + i[None, :], mask=here, other=0.0)
    beta = tl.load(beta_in + t * HV + n, mask=present, other=0.0)
    g = tl.load(g_in + t * HV + n, mask=present, other=0.0)
    v = qkv + (t * QKV_SIZE)[:, None] + (2 * HK * K + n * V + vd)
    v = tl.load(v, mask=here, other=0.0).to(tl.float32)
    k = tl.load(k_norm + (t * HK + key_head)[:, None] * K + kd, mask=here, other=0.0)
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
    initial_slots,
    snapshot_starts,
    snapshot_positions,
    snapshot_slots,
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

    state = recurrent_state + n * K * V + kd[:, None] * V + vd[None, :]
    slot_size = tl.cast(HV * K * V, tl.int64)
    initial = tl.load(initial_slots + b)
    s = tl.zeros((K, SLICE), tl.float32)
    if initial >= 0:
        s = tl.load(state + initial * slot_size)
    snapshot = tl.load(snapshot_starts + b)
    last_snapshot = tl.load(snapshot_starts + b + 1)
    snapshot_token = NO_TOKEN
    if snapshot < last_snapshot:
        snapshot_token = begin - start + tl.load(snapshot_positions + snapshot)
    last = tl.minimum(begin - start % CHUNK + CHUNK, end) - 1
    g_next = tl.load(g_in + tl.maximum(last, 0).to(tl.int64) * HV + n)
    for first in range(begin - start % CHUNK, end, CHUNK):
        # the scalar of the next chunk a chunk ahead: the compiler prefetches tiles only
        g_last = g_next
        last = tl.minimum(first + 2 * CHUNK, end) - 1
        g_next = tl.load(g_in + last.to(tl.int64) * HV + n)
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
        g = tl.load(g_in + t * HV + n, mask=present, other=0.0)
        s_act = s.to(act)
        v_new = u.to(tl.float32) - tl.dot(w, s_act)
        o = tl.dot(q, s_act) * tl.exp(g)[:, None]
        o = tl.dot(p, v_new.to(act), o)
        tl.store(out + value_rows * V + vd[None, :], o.to(act), mask=here)
        # rows that are not there: g = 0 may be far above g_last, but their v_new is 0
        carried = tl.where(present, tl.exp(tl.minimum(g_last - g, 0.0)), 0.0)
        s = tl.dot(k.T, (v_new * carried[:, None]).to(act), s * tl.exp(g_last))
        if first + CHUNK == snapshot_token:
            tl.store(state + tl.load(snapshot_slots + snapshot) * slot_size, s)
            snapshot += 1
            if snapshot < last_snapshot:
                snapshot_token = begin - start + tl.load(snapshot_positions + snapshot)
    tl.store(state + tl.load(state_slots + b) * slot_size, s)
