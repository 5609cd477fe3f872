"""Full attention over the paged cache: norms, rotation, and softmax in absolute tiles.

A decode row is computed by itself over its own context, in tiles of 64 positions. A prompt row
belongs to the query tile that its position falls in (64 rows), and reads its context in spans of
512 positions. So the shape of each product, and with it the order of its sums, is a function of
absolute positions alone, and not of the block size, a multiple of 64. Cache entries beyond the
context are never read: a block may hold anything there.
"""

from __future__ import annotations

import math

import numpy as np

from ...forward_batch import DecodeBatch, PrefillBatch
from ..base import KV_TILE
from .activations import sigmoid
from .norm import rms_norm
from .rounding import F32, I32, Act

SPAN = 8 * KV_TILE
"""Positions of the context that a query tile reads at a time."""


def qk_norm_rope_write(
    qgkv: F32,
    q_norm: F32,
    k_norm: F32,
    eps: float,
    inv_freq: F32,
    positions: I32,
    slot_mapping: I32,
    q_out: F32,
    k_cache: F32,
    v_cache: F32,
    act: Act,
) -> None:
    """See `Ops.qk_norm_rope_write`."""
    tokens, num_heads, head_dim = q_out.shape
    _, num_kv_heads, block_size, _ = k_cache.shape
    heads = qgkv.reshape(tokens, 2 * (num_heads + num_kv_heads), head_dim)
    k = np.empty((tokens, num_kv_heads, head_dim), np.float32)
    rms_norm(heads[:, :num_heads], q_norm, eps, q_out, act)
    rms_norm(heads[:, 2 * num_heads : 2 * num_heads + num_kv_heads], k_norm, eps, k, act)
    angles = (positions[:, None, None].astype(np.float32) * inv_freq).astype(np.float64)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    act(cos)
    act(sin)
    _rotate(q_out, cos, sin, act)
    _rotate(k, cos, sin, act)
    blocks, offsets = slot_mapping // block_size, slot_mapping % block_size
    k_cache[blocks, :, offsets] = k
    v_cache[blocks, :, offsets] = heads[:, 2 * num_heads + num_kv_heads :]


def _rotate(x: F32, cos: F32, sin: F32, act: Act) -> None:
    """Rotates the pairs (i, i + R/2) in place. x [T, heads, D]; cos, sin [T, 1, R/2]."""
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    products = (first * cos, second * sin, second * cos, first * sin)
    for product in products:
        act(product)
    np.subtract(products[0], products[1], out=first)
    np.add(products[2], products[3], out=second)
    act(first)
    act(second)


def attention_decode(
    q: F32,
    qgkv: F32,
    k_cache: F32,
    v_cache: F32,
    block_tables: I32,
    batch: DecodeBatch,
    out: F32,
    act: Act,
) -> None:
    """See `Ops.attention_decode`."""
    rows, num_heads, head_dim = q.shape
    num_kv_heads, block_size = k_cache.shape[1:3]
    group = num_heads // num_kv_heads
    queries = np.multiply(q, np.float32(head_dim**-0.5)).reshape(
        rows, num_kv_heads, group, head_dim, 1
    )
    heads = out.reshape(rows, num_kv_heads, group, head_dim)
    tile = math.gcd(block_size, KV_TILE)
    contexts = zip(batch.positions.tolist(), batch.state_slots.tolist(), strict=True)
    for row, (position, slot) in enumerate(contexts):
        context = position + 1
        table = block_tables[slot, : -(-context // block_size)].tolist()
        tiles = []  # positions start .. end - 1, and where they lie
        for start in range(0, context, tile):
            end, at = min(start + tile, context), start % block_size
            tiles.append((start, end, table[start // block_size], slice(at, at + end - start)))
        scores = np.empty((num_kv_heads, group, context), np.float32)
        for start, end, block, offsets in tiles:  # a product with one vector per query head
            keys = k_cache[block, :, None, offsets]
            scores[:, :, start:end] = np.matmul(keys, queries[row])[..., 0]
        scores -= np.max(scores, axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        total = np.add.reduce(scores, axis=-1, keepdims=True)
        result = heads[row]
        result[...] = 0
        for start, end, block, offsets in tiles:
            weights = scores[:, :, None, start:end]
            result += np.matmul(weights, v_cache[block, :, None, offsets])[:, :, 0]
        result /= total
    _gate(out, qgkv, num_heads * head_dim, act)


def attention_prefill(
    q: F32,
    qgkv: F32,
    k_cache: F32,
    v_cache: F32,
    block_tables: I32,
    batch: PrefillBatch,
    out: F32,
    act: Act,
) -> None:
    """See `Ops.attention_prefill`."""
    tokens, num_heads, head_dim = q.shape
    num_kv_heads = k_cache.shape[1]
    group = num_heads // num_kv_heads
    # [NKV, T, G, D]: a tile's rows of all query heads of a KV head are one matrix
    queries = np.multiply(q, np.float32(head_dim**-0.5)).reshape(
        tokens, num_kv_heads, group, head_dim
    )
    queries = np.ascontiguousarray(queries.swapaxes(0, 1))
    heads = out.reshape(tokens, num_kv_heads, group, head_dim)
    for index, slot in enumerate(batch.host_state_slots):
        first, last = batch.host_cu_seqlens[index : index + 2]
        start = batch.host_start_positions[index]
        table = block_tables[slot]
        while first < last:
            count = min(KV_TILE - start % KV_TILE, last - first)
            tile = queries[:, first : first + count].reshape(num_kv_heads, count * group, head_dim)
            result = _attend(tile, start, count, k_cache, v_cache, table)
            heads[first : first + count] = result.reshape(
                num_kv_heads, count, group, head_dim
            ).swapaxes(0, 1)
            first, start = first + count, start + count
    _gate(out, qgkv, num_heads * head_dim, act)


def _attend(tile: F32, start: int, count: int, k_cache: F32, v_cache: F32, table: I32) -> F32:
    """Causal attention of the rows at positions start .. start + count - 1, of one query tile.

    tile [NKV, count * G, D], scaled; row r is at position start + r // G. Keeps a running maximum
    and sum over the spans (Milakov and Gimelshein, "Online normalizer calculation for softmax",
    2018).
    """
    num_kv_heads, rows, head_dim = tile.shape
    context = start + count
    positions = np.repeat(np.arange(start, context), rows // count)
    largest = np.full((num_kv_heads, rows, 1), -np.inf, np.float32)
    total = np.zeros((num_kv_heads, rows, 1), np.float32)
    result = np.zeros((num_kv_heads, rows, head_dim), np.float32)
    for begin in range(0, context, SPAN):
        end = min(begin + SPAN, context)
        keys, values = (_read(cache, table, begin, end) for cache in (k_cache, v_cache))
        scores = np.matmul(tile, keys.swapaxes(1, 2))
        if end > start:
            scores[:, np.arange(begin, end) > positions[:, None]] = -np.inf
        before = largest
        largest = np.maximum(before, scores.max(axis=-1, keepdims=True))
        scores -= largest
        np.exp(scores, out=scores)
        decay = np.exp(before - largest)
        total *= decay
        total += np.add.reduce(scores, axis=-1, keepdims=True)
        result *= decay
        result += np.matmul(scores, values)
    result /= total
    return result


def _read(cache: F32, table: I32, begin: int, end: int) -> F32:
    """Positions begin .. end - 1 of one sequence, [NKV, end - begin, D]."""
    _, num_kv_heads, block_size, head_dim = cache.shape
    out = np.empty((num_kv_heads, end - begin, head_dim), np.float32)
    position = begin
    while position < end:
        offset = position % block_size
        count = min(block_size - offset, end - position)
        rows = cache[table[position // block_size], :, offset : offset + count]
        out[:, position - begin : position - begin + count] = rows
        position += count
    return out


def _gate(out: F32, qgkv: F32, width: int, act: Act) -> None:
    """out *= sigmoid(gate), the gate heads of qgkv."""
    act(out)
    gate = sigmoid(qgkv[:, width : 2 * width])
    act(gate)
    out *= gate
    act(out)
