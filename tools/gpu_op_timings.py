"""Times of the ops that are no GEMM, at Qwen3.5-4B shapes, in graphs over rotated buffers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from deltaserve.engine.ops.cuda.ops import CudaOps
from tests.batches import decode_batch, prefill_batch
from tools.gpu_arrays import Arrays
from tools.gpu_op_checks import BLOCK_SIZE, EPS, HEAD, D, on_device
from tools.gpu_timing import copies_for, graph_microseconds

H, NQ, NKV, HK, HV = 2560, 16, 4, 16, 32
CHANNELS = (2 * HK + HV) * HEAD
PROJECTION = CHANNELS + HV * (HEAD + 2)
VOCAB = 248_320

Row = dict[str, Any]


def row(op: str, size: str, us: float, moved: float = 0.0, flops: float = 0.0) -> Row:
    """`moved` bytes and `flops` that the op cannot do without."""
    return {"op": op, "size": size, "us": us, "GB/s": moved / us / 1e3, "TF/s": flops / us / 1e6}


def rotate(a: Arrays, size: int, make: Callable[[], Callable[[], None]]) -> float:
    """Time of launches from `make`, each over its own buffers of `size` bytes."""
    return graph_microseconds(a.cupy, [make() for _ in range(min(copies_for(size), 64))])


def time_norm(ops: CudaOps, a: Arrays) -> Iterator[Row]:
    for m in (1, 64, 256):
        for segments in (1, 2):
            partials, residual = a.fp32(segments, m, H), a.act(m, H)
            weight, out = a.act(H), a.poisoned(m, H)
            launch = functools.partial(
                ops.add_rms_norm_partials, partials, residual, weight, EPS, out
            )
            us = graph_microseconds(a.cupy, [launch] * 32)
            moved = m * H * (4 * segments + 6)
            yield row("add_rms_norm_partials", f"M={m} S={segments}", us, moved)
    x, weight = a.act(8192, H), a.act(H)
    out = a.poisoned(8192, H)
    us = graph_microseconds(a.cupy, [functools.partial(ops.rms_norm, x, weight, EPS, out)] * 8)
    yield row("rms_norm", "T=8192", us, 8192 * H * 4)


def time_delta_decode(ops: CudaOps, a: Arrays) -> Iterator[Row]:
    weights = a.act(CHANNELS, 4), a.fp32(HV), a.fp32(HV), a.fp32(HEAD)
    for rows in (1, 8, 64, 256):
        batch = on_device(a, decode_batch([1000] * rows, list(range(rows))))
        qkvzba, out = a.act(rows, PROJECTION), a.poisoned(rows, HV * HEAD)
        size = rows * HV * HEAD * HEAD * 4

        def make(
            rows: int = rows, batch: Any = batch, qkvzba: Any = qkvzba, out: Any = out
        ) -> Callable[[], None]:
            conv_state = a.act(rows, 4, CHANNELS)
            state = a.filled(rows, HV, HEAD, HEAD, dtype=np.float32)
            return functools.partial(
                ops.delta_net_decode, qkvzba, *weights, EPS, batch, conv_state, state, out
            )

        yield row("delta_net_decode", f"B={rows}", rotate(a, size, make), 2 * size)


def time_attention_decode(ops: CudaOps, a: Arrays) -> Iterator[Row]:
    for rows, context in ((1, 1100), (64, 1100), (64, 8192), (1, 262_144)):
        blocks = -(-context // BLOCK_SIZE)
        tables = np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)
        batch = on_device(a, decode_batch([context - 1] * rows, list(range(rows))))
        tables = a.cupy.asarray(a.rng.permutation(tables.ravel()).reshape(tables.shape))
        q, qgkv = a.act(rows, NQ, D), a.act(rows, (2 * NQ + 2 * NKV) * D)
        out = a.poisoned(rows, NQ * D)
        ops.prepare_decode(batch, a.int32(range(rows)), tables, BLOCK_SIZE)
        size = rows * context * NKV * D * 2 * 2

        def make(
            q: Any = q, qgkv: Any = qgkv, tables: Any = tables, batch: Any = batch, out: Any = out
        ) -> Callable[[], None]:
            k = a.filled(tables.size, NKV, BLOCK_SIZE, D)
            v = a.filled(tables.size, NKV, BLOCK_SIZE, D)
            return functools.partial(ops.attention_decode, q, qgkv, k, v, tables, batch, out)

        us = rotate(a, size, make)
        yield row("attention_decode", f"B={rows} context={context}", us, size)


def prefill_cases() -> Iterator[tuple[str, list[tuple[int, int]]]]:
    for tokens in (128, 1024, 8192):
        yield f"T={tokens}", [(0, tokens)]
    yield "T=64x128", [(0, 128)] * 64


def time_attention_prefill(ops: CudaOps, a: Arrays) -> Iterator[Row]:
    for name, spans in prefill_cases():
        batch = on_device(a, prefill_batch(spans, list(range(len(spans)))))
        tokens, blocks = batch.num_tokens, -(-spans[0][1] // BLOCK_SIZE)
        tables = a.int32(np.arange(len(spans) * blocks).reshape(len(spans), blocks))
        q, qgkv = a.act(tokens, NQ, D), a.act(tokens, (2 * NQ + 2 * NKV) * D)
        k, v = a.act(2, len(spans) * blocks, NKV, BLOCK_SIZE, D)
        out = a.poisoned(tokens, NQ * D)
        launch = functools.partial(ops.attention_prefill, q, qgkv, k, v, tables, batch, out)
        flops = sum(4 * NQ * D * (end * (end + 1) / 2) for _, end in spans)
        yield row("attention_prefill", name, graph_microseconds(a.cupy, [launch] * 4), 0, flops)


def time_delta_rule(ops: CudaOps, a: Arrays) -> Iterator[Row]:
    conv_weight, a_log, dt_bias = a.act(CHANNELS, 4), a.fp32(HV), a.fp32(HV)
    for name, spans in prefill_cases():
        batch = on_device(a, prefill_batch(spans, list(range(len(spans)))))
        tokens = batch.num_tokens
        qkvzba, qkv = a.act(tokens, PROJECTION), a.act(tokens, CHANNELS)
        state = a.filled(len(spans), HV, HEAD, HEAD, dtype=np.float32)
        conv_state, out = a.act(len(spans), 4, CHANNELS), a.poisoned(tokens, HV * HEAD)
        conv = functools.partial(ops.causal_conv1d, qkvzba, conv_weight, batch, conv_state, qkv)
        us = graph_microseconds(a.cupy, [conv] * 4)
        yield row("causal_conv1d", name, us, tokens * CHANNELS * 4)
        rule = functools.partial(
            ops.delta_rule_prefill, qkv, qkvzba, a_log, dt_bias, batch, state, out
        )
        us = graph_microseconds(a.cupy, [rule] * 4)
        yield row("delta_rule_prefill", name, us, 0, 184e3 * HV * tokens)
        gated = functools.partial(ops.gated_rms_norm, out, qkvzba, a.fp32(HEAD), EPS, out)
        us = graph_microseconds(a.cupy, [gated] * 4)
        yield row("gated_rms_norm", name, us, tokens * HV * HEAD * 6)


def time_rope(ops: CudaOps, a: Arrays) -> Iterator[Row]:
    inv_freq = a.cupy.asarray((1e7 ** (-np.arange(32) / 32)).astype(np.float32))
    q_norm, k_norm = a.act(D), a.act(D)
    for tokens in (1, 64, 8192):
        positions = a.int32(np.arange(tokens))
        qgkv, q = a.act(tokens, (2 * NQ + 2 * NKV) * D), a.poisoned(tokens, NQ, D)
        k, v = a.act(2, -(-tokens // BLOCK_SIZE), NKV, BLOCK_SIZE, D)
        caches = (positions, positions, q, k, v)
        launch = functools.partial(
            ops.qk_norm_rope_write, qgkv, q_norm, k_norm, EPS, inv_freq, *caches
        )
        us = graph_microseconds(a.cupy, [launch] * 8)
        yield row("qk_norm_rope_write", f"T={tokens}", us, tokens * (NQ + 2 * NKV) * D * 4)


TIMINGS: dict[str, Callable[[CudaOps, Arrays], Iterator[Row]]] = {
    name.removeprefix("time_"): function
    for name, function in list(globals().items())
    if name.startswith("time_")
}
