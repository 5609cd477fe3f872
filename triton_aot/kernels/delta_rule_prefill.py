"""The gated delta rule over prompt tokens, in chunks of 64 cut at absolute positions.

Per value head n (key head n // rep) and chunk, with G the running sum of g within the chunk and S
the state that comes in (spec section 4.2), q and k normalised:

    D_ij = exp(G_i - G_j) for j <= i, else 0
    A_ij = beta_i (k_i . k_j) D_ij for j < i, else 0;   T = (I + A)^-1
    U = T (beta v),  W = T (beta exp(G) k),  P = (q k^T) * D
    V' = U - W S;   o = exp(G) (q S) + P V';   S = exp(G_last) S + k^T (exp(G_last - G) V')

    delta_rule_scores_kernel    a program a chunk and value head: G, A and P
    delta_rule_solve_kernel     a program a chunk and value head: T
    delta_rule_products_kernel  a program a chunk and value head: U and W
    delta_rule_states_kernel    chunk after chunk: V', o, S, for one slice of the value dims

q and k go into every product as they are, in act; the factors that normalise them, one a row, are
applied in fp32 beside the others: q_scale = exp(G) / (|q| sqrt(K)), w_scale = beta exp(G) / |k|,
carried = exp(G_last - G) / |k|.

A call may start or end within a chunk: rows that are not there have q = k = v = 0, beta = 0 and
g = 0, with which the formulas leave S alone. The last chunk's part of a split prompt then starts
from S at the split, which gives the same result up to rounding; splits at multiples of 64 give the
same bits.

fp32: gates, G, D, A, T and S; T with the factors of its columns is two act parts, 16 bits. Between
the kernels U, W, P and as operands of the tensor core S and V' are act.

Workspace, a head's rows side by side: W act [HV, T, K]; U act [HV, T, V]; P act [HV, T, 64]; A,
then T, fp32 [HV, T, 64]; G and the factors of rows fp32 [HV, T].
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
def inverse_length(x, scale):
    x = x.to(tl.float32)
    return scale / tl.sqrt(tl.sum(x * x, 1) + 1e-6)


@triton.jit
def dot_scaled(inverse, scale, x):
    """(inverse * scale) x for an x in act; the left side in two parts of act."""
    left = inverse * scale[None, :]
    high = left.to(x.dtype)
    low = (left - high.to(tl.float32)).to(x.dtype)
    return tl.dot(high, x, tl.dot(low, x))


@triton.jit
def invert_diagonal_blocks(a_rows, first, begin, end):
    """Inverses of the four 16 x 16 diagonal blocks of I + A by forward substitution, one column a
    thread: two [32, 32] tiles, each with two of them on its diagonal and zeros elsewhere.
    `a_rows`: this head's A, of the (possibly absent) token `first`."""
    column = tl.arange(0, CHUNK)  # of A; its block's rows are solved
    block = column // SOLVE * SOLVE
    rows = ()
    for i in tl.static_range(SOLVE):
        t = first + block + i
        present = (t >= begin) & (t < end)
        row = a_rows + (block + i) * CHUNK + block
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
    a_out,
    p_out,
    g_out,
    beta_out,
    q_scale_out,
    w_scale_out,
    carried_out,
    NUM_SEQS,
    NUM_TOKENS,
    HK,
    HV,
    QKV_SIZE,
    PROJECTION_SIZE,
    K: tl.constexpr,
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
    act: tl.constexpr = p_out.dtype.element_ty

    gates = qkvzba + t * PROJECTION_SIZE + (PROJECTION_SIZE - 2 * HV + n)
    beta = tl.load(gates, mask=present, other=0.0).to(tl.float32)
    x = tl.load(gates + HV, mask=present, other=0.0).to(tl.float32) + tl.load(dt_bias + n)
    decay = -tl.exp(tl.load(a_log + n))
    row = qkv + (t * QKV_SIZE)[:, None]
    k = tl.load(row + (HK + key_head) * K + kd, mask=here, other=0.0)
    q = tl.load(row + key_head * K + kd, mask=here, other=0.0)

    beta = (1.0 / (1.0 + tl.exp(-beta))).to(act).to(tl.float32)
    beta = tl.where(present, beta, 0.0)
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
    g = tl.cumsum(tl.where(present, decay * softplus, 0.0), 0)
    k_scale = inverse_length(k, 1.0)
    q_scale = inverse_length(q, 1.0 / K**0.5)
    at = n * tl.cast(NUM_TOKENS, tl.int64) + t
    exp_g = tl.exp(g)
    last = tl.minimum(first + CHUNK, end) - 1
    g_last = tl.sum(tl.where(first + i == last, g, 0.0), 0)
    # rows that are not there: g = 0 may be far above g_last
    carried = tl.exp(tl.minimum(g_last - g, 0.0)) * k_scale
    tl.store(g_out + at, g, mask=present)
    tl.store(beta_out + at, beta, mask=present)
    tl.store(q_scale_out + at, q_scale * exp_g, mask=present)
    tl.store(w_scale_out + at, beta * exp_g * k_scale, mask=present)
    tl.store(carried_out + at, carried, mask=present)

    d = tl.exp(tl.where(i[:, None] >= i[None, :], g[:, None] - g[None, :], float("-inf")))
    d *= k_scale[None, :]
    pair = at[:, None] * CHUNK + i[None, :]
    p = tl.dot(q, k.T) * d * q_scale[:, None]
    tl.store(p_out + pair, p.to(act), mask=here)
    a = tl.dot(k, k.T) * d * (beta * k_scale)[:, None]
    tl.store(a_out + pair, tl.where(i[:, None] > i[None, :], a, 0.0), mask=here)


@triton.jit
def delta_rule_solve_kernel(a_and_t, cu_seqlens, start_positions, NUM_SEQS, NUM_TOKENS):
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
    rows = a_and_t + (n * tl.cast(NUM_TOKENS, tl.int64) + first) * CHUNK
    tile0 = rows + i[:, None] * CHUNK + i[None, :]
    tile1 = tile0 + CHUNK * HALF
    blocks0, blocks1 = invert_diagonal_blocks(rows, first, begin, end)
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
    t_in,
    beta_in,
    w_scale_in,
    cu_seqlens,
    start_positions,
    w_out,
    u_out,
    NUM_SEQS,
    NUM_TOKENS,
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
    at = n * tl.cast(NUM_TOKENS, tl.int64) + t
    inverse = tl.load(t_in + at[:, None] * CHUNK + i[None, :], mask=here, other=0.0)
    beta = tl.load(beta_in + at, mask=present, other=0.0)
    w_scale = tl.load(w_scale_in + at, mask=present, other=0.0)
    row = qkv + (t * QKV_SIZE)[:, None]
    v = tl.load(row + 2 * HK * K + n * V + vd, mask=here, other=0.0)
    k = tl.load(row + (HK + key_head) * K + kd, mask=here, other=0.0)
    u = dot_scaled(inverse, beta, v)
    tl.store(u_out + at[:, None] * V + vd, u.to(act), mask=here)
    w = dot_scaled(inverse, w_scale, k)
    tl.store(w_out + at[:, None] * K + kd, w.to(act), mask=here)


@triton.jit
def delta_rule_states_kernel(
    qkv,
    w_in,
    u_in,
    p_in,
    g_in,
    q_scale_in,
    carried_in,
    cu_seqlens,
    start_positions,
    state_slots,
    initial_slots,
    snapshot_starts,
    snapshot_positions,
    snapshot_slots,
    recurrent_state,
    out,
    NUM_TOKENS,
    HK,
    HV,
    QKV_SIZE,
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
    head = n * tl.cast(NUM_TOKENS, tl.int64)
    first = begin - start % CHUNK
    g_next = tl.load(g_in + head + tl.maximum(tl.minimum(first + CHUNK, end) - 1, 0))
    present = (first + i >= begin) & (first + i < end)
    q_scale_next = tl.load(q_scale_in + head + first + i, mask=present, other=0.0)
    carried_next = tl.load(carried_in + head + first + i, mask=present, other=0.0)
    for first in range(begin - start % CHUNK, end, CHUNK):
        # the factors of the next chunk a chunk ahead: the compiler prefetches tiles only
        g_last = g_next
        q_scale = q_scale_next
        carried = carried_next
        t = first + CHUNK + i
        g_next = tl.load(g_in + head + tl.minimum(first + 2 * CHUNK, end) - 1)
        q_scale_next = tl.load(q_scale_in + head + t, mask=t < end, other=0.0)
        carried_next = tl.load(carried_in + head + t, mask=t < end, other=0.0)
        t = first + i
        present = (t >= begin) & (t < end)
        here = present[:, None]
        t = t.to(tl.int64)
        value_rows = (head + t)[:, None]
        key_rows = qkv + (t * QKV_SIZE)[:, None] + key_head * K + kd[None, :]
        w = tl.load(w_in + value_rows * K + kd[None, :], mask=here, other=0.0)
        u = tl.load(u_in + value_rows * V + vd[None, :], mask=here, other=0.0)
        q = tl.load(key_rows, mask=here, other=0.0)
        k = tl.load(key_rows + HK * K, mask=here, other=0.0)
        p = tl.load(p_in + value_rows * CHUNK + i[None, :], mask=here, other=0.0)
        s_act = s.to(act)
        v_new = u.to(tl.float32) - tl.dot(w, s_act)
        o = tl.dot(q, s_act) * q_scale[:, None]
        o = tl.dot(p, v_new.to(act), o)
        tl.store(out + ((t * HV + n) * V)[:, None] + vd[None, :], o.to(act), mask=here)
        s = tl.dot(k.T, (v_new * carried[:, None]).to(act), s * tl.exp(g_last))
        if first + CHUNK == snapshot_token:
            tl.store(state + tl.load(snapshot_slots + snapshot) * slot_size, s)
            snapshot += 1
            if snapshot < last_snapshot:
                snapshot_token = begin - start + tl.load(snapshot_positions + snapshot)
    tl.store(state + tl.load(state_slots + b) * slot_size, s)
