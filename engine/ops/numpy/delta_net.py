"""Linear attention: the short convolution and the gated delta rule, chunked and one token a row.

Notation as in the specification, section 4. A chunk is 64 positions from an absolute multiple of
64, or what a call has of them, so the shapes of its products, and with them the order of their
sums, do not depend on how a prompt is split at such multiples.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...forward_batch import DecodeBatch, PrefillBatch
from ..base import CONV_RING, DELTA_CHUNK
from .activations import sigmoid, silu, softplus
from .norm import gated_rms_norm, square_sum
from .rounding import F32, Act
from .row_threads import for_rows

L2_EPS = np.float32(1e-6)
_TAPS = CONV_RING
_STATE_ROWS = 4  # decode rows whose states are updated together: a few, for the cache's sake
_WINDOW = np.arange(1 - _TAPS, 1, dtype=np.int32)


def causal_conv1d(
    qkvzba: F32, weight: F32, batch: PrefillBatch, conv_state: F32, out: F32, act: Act
) -> None:
    """See `Ops.causal_conv1d`."""
    channels = out.shape[1]
    taps = np.ascontiguousarray(weight.T)
    for index, slot in enumerate(batch.host_state_slots):
        first, last = batch.host_cu_seqlens[index : index + 2]
        start, end = (batch.host_start_positions[index] + t for t in (0, last - first))
        initial = batch.host_initial_slots[index]
        before = np.arange(start - CONV_RING, start)
        rows = np.empty((CONV_RING + last - first, channels), np.float32)
        rows[:CONV_RING] = conv_state[initial, before % CONV_RING] if initial >= 0 else 0
        rows[:CONV_RING][before < 0] = 0
        rows[CONV_RING:] = qkvzba[first:last, :channels]
        target = out[first:last]
        np.multiply(rows[1 : 1 + last - first], taps[0], out=target)
        for tap in range(1, _TAPS):
            target += rows[1 + tap : 1 + tap + last - first] * taps[tap]
        for position, kept_in in (*batch.host_snapshots[index], (end, slot)):
            kept = np.arange(max(position - CONV_RING, 0), position)
            conv_state[kept_in, kept % CONV_RING] = rows[CONV_RING - start + kept]
        act(target)
        target[...] = silu(target)
        act(target)


def delta_rule_prefill(
    qkv: F32,
    qkvzba: F32,
    a_log: F32,
    dt_bias: F32,
    batch: PrefillBatch,
    recurrent_state: F32,
    out: F32,
    act: Act,
) -> None:
    """See `Ops.delta_rule_prefill`."""
    _, value_heads, key_dim, value_dim = recurrent_state.shape
    tokens = len(qkv)
    queries_keys, v = _split_heads(qkv, value_heads, key_dim, value_dim)
    beta, decay = _gates(qkvzba, a_log, dt_bias, act)
    outputs = out.reshape(tokens, value_heads, value_dim)
    for index, slot in enumerate(batch.host_state_slots):
        first, last = batch.host_cu_seqlens[index : index + 2]
        start, initial = batch.host_start_positions[index], batch.host_initial_slots[index]
        snapshots = dict(batch.host_snapshots[index])
        state = recurrent_state[slot]
        if initial != slot:
            state[...] = recurrent_state[initial] if initial >= 0 else 0
        while first < last:
            count = min(DELTA_CHUNK - start % DELTA_CHUNK, last - first)
            rows = slice(first, first + count)
            outputs[rows] = _chunk(queries_keys[rows], v[rows], beta[rows], decay[rows], state)
            first, start = first + count, start + count
            if start in snapshots:
                recurrent_state[snapshots[start]] = state
    act(out)


def _chunk(queries_keys: F32, v: F32, beta: F32, decay: F32, state: F32) -> F32:
    """n tokens of one sequence; updates `state` [HV, K, V] in place.

    queries_keys [n, 2, HK, K]; v [n, HV, V]; beta, decay (g) [n, HV]. Returns [n, HV, V]. The
    specification's V' = U - W S0 is computed as Tm (beta (V - exp(G) K S0)): with S0 at hand, one
    product with Tm does for two.
    """
    count, _, key_heads, key_dim = queries_keys.shape
    value_heads, value_dim = v.shape[1:]
    rep = value_heads // key_heads
    queries_keys = np.ascontiguousarray(queries_keys.transpose(2, 1, 0, 3))
    k = queries_keys[:, 1]
    queries_keys = queries_keys.reshape(key_heads, 2 * count, key_dim)
    beta = np.ascontiguousarray(beta.T)[:, :, None]
    total = np.cumsum(np.ascontiguousarray(decay.T), axis=1)  # G
    decays = total[:, :, None] - total[:, None, :]  # D, once masked (exp overflows elsewhere)
    decays[:, np.triu(np.ones((count, count), bool), 1)] = -np.inf
    np.exp(decays, out=decays)
    grown = np.exp(total)[:, :, None]

    products = np.matmul(queries_keys, k.swapaxes(1, 2)).reshape(key_heads, 1, 2, count, count)
    products = products * decays.reshape(key_heads, rep, 1, count, count)
    products = products.reshape(value_heads, 2, count, count)
    reads = np.matmul(queries_keys[:, None], state.reshape(key_heads, rep, key_dim, value_dim))
    reads = reads.reshape(value_heads, 2, count, value_dim)
    reads *= grown[:, None]

    sides = v.swapaxes(0, 1) - reads[:, 1]
    sides *= beta
    writes = np.matmul(unit_lower_inverse(products[:, 1] * beta), sides)
    result = np.matmul(products[:, 0], writes)
    result += reads[:, 0]

    last = total[:, -1:]
    keys = np.repeat(k, rep, axis=0)
    keys *= np.exp(last - total)[:, :, None]
    state *= np.exp(last)[:, :, None]
    state += np.matmul(keys.swapaxes(1, 2), writes)
    out: F32 = result.swapaxes(0, 1)
    return out


def unit_lower_inverse(a: F32) -> F32:
    """(I + A)^-1 for the strictly lower part A of each a [B, n, n].

    Diagonal blocks of the inverse are merged in pairs, T10 = -T11 A10 T00, from blocks of one row
    on. That is forward substitution in another order: no power of A is formed, whose entries could
    be large.
    """
    batch, count, _ = a.shape
    padded = 1 << (count - 1).bit_length()
    inverse = np.zeros((batch, padded, padded), np.float32)
    diagonal = np.arange(padded)
    inverse[:, diagonal, diagonal] = 1
    if padded != count:
        whole = np.zeros_like(inverse)
        whole[:, :count, :count] = a
        a = whole
    half = 1
    while half < padded:
        blocks, known = _diagonal_blocks(a, 2 * half), _diagonal_blocks(inverse, 2 * half)
        top, bottom = known[..., :half, :half], known[..., half:, half:]
        merged = np.matmul(np.matmul(bottom, blocks[..., half:, :half]), top)
        np.negative(merged, out=known[..., half:, :half])
        half *= 2
    return inverse[:, :count, :count]


def _diagonal_blocks(x: F32, size: int) -> F32:
    """The blocks [B, n / size, size, size] on the diagonals of x [B, n, n], a view."""
    batch, count, _ = x.shape
    outer, row, column = x.strides
    return np.lib.stride_tricks.as_strided(
        x, (batch, count // size, size, size), (outer, size * (row + column), row, column)
    )


def delta_net_decode(
    qkvzba: F32,
    conv_weight: F32,
    a_log: F32,
    dt_bias: F32,
    norm_weight: F32,
    eps: float,
    batch: DecodeBatch,
    conv_state: F32,
    recurrent_state: F32,
    out: F32,
    act: Act,
) -> None:
    """See `Ops.delta_net_decode`."""
    rows = len(qkvzba)
    _, value_heads, key_dim, value_dim = recurrent_state.shape
    qkv = _conv_decode(qkvzba, conv_weight, batch, conv_state, act)
    channels = qkv.shape[1]
    queries_keys, v = _split_heads(qkv, value_heads, key_dim, value_dim)
    queries_keys = np.repeat(queries_keys, value_heads // queries_keys.shape[2], axis=2)
    q, k = queries_keys[:, 0], queries_keys[:, 1]
    beta, decay = _gates(qkvzba, a_log, dt_bias, act)
    kept, beta = np.exp(decay)[:, :, None, None], beta[:, :, None]
    outputs = out.reshape(rows, value_heads, value_dim)
    slots = batch.state_slots.tolist()

    def advance(first: int, last: int) -> None:
        update = np.empty((_STATE_ROWS, value_heads, value_dim), np.float32)
        written = np.empty((_STATE_ROWS, value_heads, key_dim, value_dim), np.float32)
        for start, end in _consecutive(slots, first, last):
            state = recurrent_state[slots[start] : slots[start] + end - start]
            u, w = update[: end - start], written[: end - start]
            state *= kept[start:end]
            np.matmul(k[start:end, :, None], state, out=u[:, :, None])
            np.subtract(v[start:end], u, out=u)
            u *= beta[start:end]
            np.multiply(k[start:end, :, :, None], u[:, :, None], out=w)
            state += w
            np.matmul(q[start:end, :, None], state, out=outputs[start:end, :, None])

    for_rows(rows, advance)
    act(out)
    z = qkvzba[:, channels : channels + value_heads * value_dim].reshape(outputs.shape)
    gated_rms_norm(outputs, z, norm_weight, eps, outputs, act)


def _consecutive(slots: list[int], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Cuts rows first .. last into runs of at most _STATE_ROWS whose slots follow each other, so
    that their states are one piece of the cache."""
    start = first
    for row in range(first + 1, last + 1):
        if row == last or row - start == _STATE_ROWS or slots[row] != slots[row - 1] + 1:
            yield start, row
            start = row


def _conv_decode(qkvzba: F32, weight: F32, batch: DecodeBatch, conv_state: F32, act: Act) -> F32:
    """Stores each row's channels in its ring and convolves the last four; [B, C]."""
    channels = weight.shape[0]
    slots, positions = batch.state_slots, batch.positions
    conv_state[slots, positions % CONV_RING] = qkvzba[:, :channels]
    window = positions[:, None] + _WINDOW
    rows = conv_state[slots[:, None], window % CONV_RING]
    if (window < 0).any():
        rows[window < 0] = 0
    rows *= np.ascontiguousarray(weight.T)
    out: F32 = rows[:, 0] + rows[:, 1]
    out += rows[:, 2]
    out += rows[:, 3]
    act(out)
    out = silu(out)
    act(out)
    return out


def _split_heads(qkv: F32, value_heads: int, key_dim: int, value_dim: int) -> tuple[F32, F32]:
    """l2norm(q) / sqrt(K) and l2norm(k) as one array [T, 2, HK, K], and v [T, HV, V]."""
    tokens, channels = qkv.shape
    key_size = (channels - value_heads * value_dim) // 2
    queries_keys = qkv[:, : 2 * key_size].reshape(tokens, 2, key_size // key_dim, key_dim)
    length = square_sum(queries_keys)
    length += L2_EPS
    np.sqrt(length, out=length)
    length[:, 0] *= np.float32(key_dim**0.5)
    v = qkv[:, 2 * key_size :].reshape(tokens, value_heads, value_dim)
    return queries_keys / length, v


def _gates(qkvzba: F32, a_log: F32, dt_bias: F32, act: Act) -> tuple[F32, F32]:
    """beta and g, both [T, HV], from the last columns b and a."""
    heads = len(a_log)
    beta = sigmoid(qkvzba[:, -2 * heads : -heads])
    act(beta)
    decay = softplus(qkvzba[:, -heads:] + dt_bias)
    decay *= -np.exp(a_log)
    return beta, decay
