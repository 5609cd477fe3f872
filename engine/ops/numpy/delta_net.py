"""Linear attention: the short convolution and the gated delta rule, chunked and one token a row.

Notation as in the specification, section 4. A chunk is 64 positions from an absolute multiple of
64, or what a call has of them, so the shapes of its products, and with them the order of their
sums, do not depend on how a prompt is split at such multiples.
"""

from __future__ import annotations

import numpy as np

from ...forward_batch import DecodeBatch, PrefillBatch
from ..base import CONV_RING, DELTA_CHUNK
from .activations import sigmoid, silu, softplus
from .norm import gated_rms_norm, square_sum
from .rounding import F32, Act

L2_EPS = np.float32(1e-6)
_TAPS = CONV_RING


def causal_conv1d(
    qkvzba: F32, weight: F32, batch: PrefillBatch, conv_state: F32, out: F32, act: Act
) -> None:
    """See `Ops.causal_conv1d`."""
    channels = out.shape[1]
    taps = np.ascontiguousarray(weight.T)
    carried = np.arange(1 - _TAPS, 0)
    for index, slot in enumerate(batch.host_state_slots):
        first, last = batch.host_cu_seqlens[index : index + 2]
        start, count = batch.host_start_positions[index], last - first
        rows = np.empty((_TAPS - 1 + count, channels), np.float32)
        if start == 0:
            rows[: _TAPS - 1] = 0
        else:
            rows[: _TAPS - 1] = conv_state[slot, (start + carried) % CONV_RING]
            rows[: _TAPS - 1][start + carried < 0] = 0
        rows[_TAPS - 1 :] = qkvzba[first:last, :channels]
        target = out[first:last]
        np.multiply(rows[:count], taps[0], out=target)
        for tap in range(1, _TAPS):
            target += rows[tap : tap + count] * taps[tap]
        kept = np.arange(max(count - CONV_RING, 0), count)
        conv_state[slot, (start + kept) % CONV_RING] = rows[_TAPS - 1 + kept]
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
    q, k, v = _split_heads(qkv, value_heads, key_dim, value_dim)
    beta, decay = _gates(qkvzba, a_log, dt_bias, act)
    outputs = out.reshape(tokens, value_heads, value_dim)
    for index, slot in enumerate(batch.host_state_slots):
        first, last = batch.host_cu_seqlens[index : index + 2]
        start = batch.host_start_positions[index]
        state = recurrent_state[slot]
        if start == 0:
            state[...] = 0
        while first < last:
            count = min(DELTA_CHUNK - start % DELTA_CHUNK, last - first)
            rows = slice(first, first + count)
            outputs[rows] = _chunk(q[rows], k[rows], v[rows], beta[rows], decay[rows], state)
            first, start = first + count, start + count
    act(out)


def _chunk(q: F32, k: F32, v: F32, beta: F32, decay: F32, state: F32) -> F32:
    """n tokens of one sequence (specification 4.2); updates `state` [HV, K, V] in place.

    q, k [n, HK, K]; v [n, HV, V]; beta, decay (g) [n, HV]. Returns [n, HV, V].
    """
    count, key_heads = q.shape[:2]
    value_heads, value_dim = v.shape[1:]
    rep = value_heads // key_heads
    q, k, v = (np.ascontiguousarray(x.swapaxes(0, 1)) for x in (q, k, v))
    beta = np.ascontiguousarray(beta.T)[:, :, None]
    total = np.cumsum(np.ascontiguousarray(decay.T), axis=1)
    decays = total[:, :, None] - total[:, None, :]
    decays[:, np.triu(np.ones((count, count), bool), 1)] = -np.inf  # before exp: it overflows there
    np.exp(decays, out=decays)
    grown = np.exp(total)[:, :, None]
    per_head = (key_heads, rep)
    keys = np.repeat(k, rep, axis=0)

    system = np.matmul(k, k.swapaxes(1, 2))[:, None] * decays.reshape(*per_head, count, count)
    system = system.reshape(value_heads, count, count)
    system *= beta
    diagonal = np.arange(count)
    system[:, diagonal, diagonal] = 1  # I + A: strictly lower triangular besides
    sides = np.concatenate((v * beta, keys * (beta * grown)), axis=2)
    solved = np.linalg.solve(system, sides)
    writes = solved[:, :, :value_dim] - np.matmul(solved[:, :, value_dim:], state)

    scores = np.matmul(q, k.swapaxes(1, 2))[:, None] * decays.reshape(*per_head, count, count)
    result = np.matmul(np.repeat(q, rep, axis=0), state)
    result *= grown
    result += np.matmul(scores.reshape(value_heads, count, count), writes)

    last = total[:, -1:]
    keys *= np.exp(last - total)[:, :, None]
    state *= np.exp(last)[:, :, None]
    state += np.matmul(keys.swapaxes(1, 2), writes)
    out: F32 = result.swapaxes(0, 1)
    return out


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
    q, k, v = _split_heads(qkv, value_heads, key_dim, value_dim)
    key_heads = q.shape[1]
    rep = value_heads // key_heads
    beta, decay = _gates(qkvzba, a_log, dt_bias, act)
    kept = np.exp(decay)[:, :, None, None]
    beta = beta[:, :, None]
    k, q = np.repeat(k, rep, axis=1), np.repeat(q, rep, axis=1)
    reads = np.empty((rows, value_heads, 1, value_dim), np.float32)
    outputs = out.reshape(rows, value_heads, value_dim)
    written = np.empty((value_heads, key_dim, value_dim), np.float32)
    for row, slot in enumerate(batch.state_slots.tolist()):
        state = recurrent_state[slot]
        state *= kept[row]
        np.matmul(k[row, :, None, :], state, out=reads[row])
        update = v[row] - reads[row, :, 0]
        update *= beta[row]
        np.multiply(k[row, :, :, None], update[:, None, :], out=written)
        state += written
        np.matmul(q[row, :, None, :], state, out=outputs[row, :, None, :])
    act(out)
    z = qkvzba[:, channels : channels + value_heads * value_dim].reshape(outputs.shape)
    gated_rms_norm(outputs, z, norm_weight, eps, outputs, act)


def _conv_decode(qkvzba: F32, weight: F32, batch: DecodeBatch, conv_state: F32, act: Act) -> F32:
    """Stores each row's channels in its ring and convolves the last four; [B, C]."""
    channels = weight.shape[0]
    slots, positions = batch.state_slots, batch.positions
    conv_state[slots, positions % CONV_RING] = qkvzba[:, :channels]
    window = positions[:, None] + np.arange(1 - _TAPS, 1, dtype=np.int32)
    rows = conv_state[slots[:, None], window % CONV_RING]
    if (window < 0).any():
        rows[window < 0] = 0
    rows *= weight.T
    out: F32 = rows[:, 0] + rows[:, 1]
    out += rows[:, 2]
    out += rows[:, 3]
    act(out)
    out = silu(out)
    act(out)
    return out


def _split_heads(qkv: F32, value_heads: int, key_dim: int, value_dim: int) -> tuple[F32, F32, F32]:
    """l2norm(q) / sqrt(K) and l2norm(k), both [T, HK, K], and v [T, HV, V]."""
    tokens, channels = qkv.shape
    key_size = (channels - value_heads * value_dim) // 2
    keys_queries = qkv[:, : 2 * key_size].reshape(tokens, 2, key_size // key_dim, key_dim)
    length = square_sum(keys_queries)
    length += L2_EPS
    np.sqrt(length, out=length)
    length[:, 0] *= np.float32(key_dim**0.5)
    unit = keys_queries / length
    v = qkv[:, 2 * key_size :].reshape(tokens, value_heads, value_dim)
    return unit[:, 0], unit[:, 1], v


def _gates(qkvzba: F32, a_log: F32, dt_bias: F32, act: Act) -> tuple[F32, F32]:
    """beta and g, both [T, HV], from the last columns b and a."""
    heads = len(a_log)
    beta = sigmoid(qkvzba[:, -2 * heads : -heads])
    act(beta)
    decay = softplus(qkvzba[:, -heads:] + dt_bias)
    decay *= -np.exp(a_log)
    return beta, decay
