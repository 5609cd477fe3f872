"""What tools/bench_ops.py times: every op of a model at one size, with the bytes and FLOPs that it
cannot do without.

A `Case` makes launches over fresh weights, states or KV blocks each time it is asked, so that the
timer rotates among more of them than the cache holds. Activations are few and stay the same, as in
the engine, where the op before has just written them. GEMMs of decode rows that are summed from
segments are timed with that sum, the residual addition and the norm.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from deltaserve.engine.config import ModelConfig
from deltaserve.engine.forward_batch import SampleBatch
from deltaserve.engine.ops.cuda.ops import CudaOps
from tests.batches import decode_batch, prefill_batch
from tools.gpu_arrays import Arrays
from tools.gpu_op_checks import BLOCK_SIZE, EPS, on_device
from tools.gpu_sample_checks import sample_batches

Launch = Callable[[], None]


@dataclass(frozen=True)
class Case:
    """`rotated`: bytes of what `make` makes anew; `flops` of matrix products alone."""

    op: str
    size: str
    moved: float
    flops: float
    rotated: int
    make: Callable[[], list[Launch]]


@dataclass(frozen=True)
class Bench:
    """The ops and arrays that cases are made of."""

    ops: CudaOps
    arrays: Arrays
    config: ModelConfig

    def weight(self, n: int, k: int) -> Any:
        return self.arrays.filled(n, k, scale=k**-0.5)


def with_weight(
    op: Callable[..., None], x: Any, out: Any, *then: Launch
) -> Callable[[Any], list[Launch]]:
    """From a weight to the launch of its GEMM and of what follows it."""
    return lambda weight: [functools.partial(op, x, weight, out), *then]


def gemms(bench: Bench, m: int, decode: bool) -> Iterator[Case]:
    """The GEMMs of both kinds of layer for m rows; the output head, of which few rows are wanted,
    with the decode rows."""
    c, ops, a = bench.config, bench.ops, bench.arrays
    h, f = c.hidden_size, c.intermediate_size
    size = f"{'B' if decode else 'T'}={m}"
    hidden, residual, norm = a.filled(m, h), a.filled(m, h), a.act(h)

    def case(op: str, n: int, k: int, extra: float, make: Callable[[Any], list[Launch]]) -> Case:
        moved = 2 * n * k + 2 * m * k + extra
        return Case(op, size, moved, 2.0 * m * n * k, 2 * n * k, lambda: make(bench.weight(n, k)))

    linear = ops.linear_decode if decode else ops.linear
    for name, n in (("qkvzba", c.linear_in_size), ("qgkv", c.attention_in_size)):
        out = a.poisoned(m, n)
        yield case(
            f"linear {name}",
            n,
            h,
            2 * m * n,
            with_weight(linear, hidden, out),
        )
    silu_mul = ops.linear_silu_mul_decode if decode else ops.linear_silu_mul
    gated = a.poisoned(m, f)
    yield case(
        "linear_silu_mul",
        2 * f,
        h,
        2 * m * f,
        with_weight(silu_mul, hidden, gated),
    )
    narrow = {"out": c.value_size, "attention out": c.num_query_heads * c.head_dim, "down": f}
    if narrow["out"] == narrow["attention out"]:
        del narrow["attention out"]
    for name, k in narrow.items():
        x = a.filled(m, k)
        if not decode:
            out = a.poisoned(m, h)
            yield case(
                f"linear {name}",
                h,
                k,
                2 * m * h,
                with_weight(linear, x, out),
            )
            continue
        parts = a.poisoned(ops.num_segments(h, k), m, h, dtype="float32")
        add = functools.partial(ops.add_rms_norm_partials, parts, residual, norm, EPS, hidden)
        yield case(
            f"linear_partials {name}, add_rms_norm",
            h,
            k,
            6 * m * h,
            with_weight(ops.linear_partials, x, parts, add),
        )
    if decode:
        logits = a.poisoned(m, c.vocab_size, dtype="float32")
        yield case(
            "lm_head",
            c.vocab_size,
            h,
            4 * m * c.vocab_size,
            with_weight(ops.lm_head, hidden, logits),
        )


def embedding_and_norms(bench: Bench, m: int, decode: bool) -> Iterator[Case]:
    c, ops, a = bench.config, bench.ops, bench.arrays
    h = c.hidden_size
    size = f"{'B' if decode else 'T'}={m}"
    ids = a.int32(a.rng.integers(0, c.vocab_size, m))
    x, residual, weight, out = a.filled(m, h), a.filled(m, h), a.act(h), a.poisoned(m, h)

    def embed() -> list[Launch]:
        return [functools.partial(ops.embed, ids, bench.weight(c.vocab_size, h), out)]

    def case(op: str, arrays: int, *args: Any) -> Case:
        launch = functools.partial(getattr(ops, op), *args)
        return Case(op, size, 2.0 * arrays * m * h, 0.0, 0, lambda: [launch])

    yield Case("embed", size, 4.0 * m * h, 0.0, 2 * c.vocab_size * h, embed)
    yield case("rms_norm", 2, x, weight, EPS, out)
    if not decode:
        yield case("add_rms_norm", 4, x, residual, weight, EPS, out)
        return
    for segments in (1, 2, 4):
        parts = a.fp32(segments, m, h)
        launch = functools.partial(ops.add_rms_norm_partials, parts, residual, weight, EPS, out)
        moved = m * h * (4.0 * segments + 6)
        name = f"add_rms_norm_partials S={segments}"
        yield Case(name, size, moved, 0.0, 0, functools.partial(list, (launch,)))


def rope(bench: Bench, m: int, decode: bool) -> Case:
    c, ops, a = bench.config, bench.ops, bench.arrays
    nq, nkv, d = c.num_query_heads, c.num_kv_heads, c.head_dim
    inv_freq = a.cupy.asarray((1e7 ** (-np.arange(32) / 32)).astype(np.float32))
    positions, q_norm, k_norm = a.int32(np.arange(m)), a.act(d), a.act(d)
    qgkv, q = a.filled(m, c.attention_in_size), a.poisoned(m, nq, d)
    k, v = a.filled(2, -(-m // BLOCK_SIZE), nkv, BLOCK_SIZE, d)
    args = (qgkv, q_norm, k_norm, EPS, inv_freq, positions, positions, q, k, v)
    launch = functools.partial(ops.qk_norm_rope_write, *args)
    moved = 4.0 * m * (nq + 2 * nkv) * d
    return Case(
        "qk_norm_rope_write", f"{'B' if decode else 'T'}={m}", moved, 0.0, 0, lambda: [launch]
    )


def decode_mixers(bench: Bench, rows: int, context: int) -> Iterator[Case]:
    c, ops, a = bench.config, bench.ops, bench.arrays
    yield delta_net_decode(bench, rows)
    yield rope(bench, rows, True)
    nq, nkv, d = c.num_query_heads, c.num_kv_heads, c.head_dim
    blocks = -(-context // BLOCK_SIZE)
    tables = a.int32(a.rng.permutation(rows * blocks).reshape(rows, blocks))
    batch = on_device(a, decode_batch([context - 1] * rows, list(range(rows))))
    q, qgkv = a.act(rows, nq, d), a.act(rows, c.attention_in_size)
    out, next_ids = a.poisoned(rows, nq * d), a.int32(np.zeros(rows))
    size, moved = f"B={rows} context={context}", 4.0 * rows * context * nkv * d
    prepare = functools.partial(ops.prepare_decode, batch, next_ids, tables, BLOCK_SIZE)
    yield Case("prepare_decode", size, 0.0, 0.0, 0, lambda: [prepare])
    prepare()

    def attention() -> list[Launch]:
        k = a.filled(rows * blocks, nkv, BLOCK_SIZE, d)
        v = a.filled(rows * blocks, nkv, BLOCK_SIZE, d)
        return [functools.partial(ops.attention_decode, q, qgkv, k, v, tables, batch, out)]

    yield Case("attention_decode", size, moved, 0.0, int(moved), attention)


def delta_net_decode(bench: Bench, rows: int) -> Case:
    c, ops, a = bench.config, bench.ops, bench.arrays
    heads, dim = c.num_value_heads, c.value_head_dim
    batch = on_device(a, decode_batch([1000] * rows, list(range(rows))))
    qkvzba, out = a.act(rows, c.linear_in_size), a.poisoned(rows, c.value_size)
    weights = a.act(c.conv_channels, 4), a.fp32(heads), a.fp32(heads), a.fp32(dim)
    state_bytes = 4 * rows * heads * c.key_head_dim * dim

    def make() -> list[Launch]:
        conv = a.filled(rows, 4, c.conv_channels)
        state = a.filled(rows, heads, c.key_head_dim, dim, dtype=np.float32)
        args = (qkvzba, *weights, EPS, batch, conv, state, out)
        return [functools.partial(ops.delta_net_decode, *args)]

    return Case("delta_net_decode", f"B={rows}", 2.0 * state_bytes, 0.0, state_bytes, make)


SAMPLED = ("greedy", "top-p", "top-k, top-p", "top-k, top-p, penalties")


def sampling(bench: Bench, rows: int) -> Iterator[Case]:
    c, ops, a = bench.config, bench.ops, bench.arrays
    outs = (
        a.int32(np.zeros(rows)),
        a.int32(np.zeros(rows)),
        a.fp32(rows),
        a.int32(np.zeros((rows, 20))),
        a.fp32(rows, 20),
    )
    for name, batch in sample_batches(a, rows, c.vocab_size):
        if name not in SAMPLED:
            continue

        def make(batch: SampleBatch = batch) -> list[Launch]:
            logits = a.filled(rows, c.vocab_size, dtype=np.float32)
            return [functools.partial(ops.sample, logits, batch, *outs)]

        size = 4 * rows * c.vocab_size
        yield Case(f"sample {name}", f"B={rows}", size, 0.0, size, make)


def prefill_mixers(bench: Bench, lengths: list[int]) -> Iterator[Case]:
    """Prompts of these lengths in one call, from position 0."""
    c, ops, a = bench.config, bench.ops, bench.arrays
    count, tokens = len(lengths), sum(lengths)
    size = f"T={tokens}" if count == 1 else f"T={count}x{lengths[0]}"
    spans = [(0, length) for length in lengths]
    batch = on_device(a, prefill_batch(spans, list(range(count))))
    heads, value_size = c.num_value_heads, c.value_size

    def case(op: str, moved: float, flops: float, *args: Any) -> Case:
        launch = functools.partial(getattr(ops, op), *args)
        return Case(op, size, moved, flops, 0, lambda: [launch])

    qkvzba, qkv = a.filled(tokens, c.linear_in_size), a.filled(tokens, c.conv_channels)
    state = a.filled(count, heads, c.key_head_dim, c.value_head_dim, dtype=np.float32)
    conv_state, mixed = a.act(count, 4, c.conv_channels), a.poisoned(tokens, value_size)
    conv_args = (qkvzba, a.act(c.conv_channels, 4), batch, conv_state, qkv)
    yield case("causal_conv1d", 4.0 * tokens * c.conv_channels, 0.0, *conv_args)
    rule_args = (qkv, qkvzba, a.fp32(heads), a.fp32(heads), batch, state, mixed)
    moved = 2.0 * tokens * (c.conv_channels + 2 * heads + value_size)
    yield case("delta_rule_prefill", moved, 184e3 * heads * tokens, *rule_args)
    norm_args = (mixed, qkvzba, a.fp32(c.value_head_dim), EPS, mixed)
    yield case("gated_rms_norm", 6.0 * tokens * value_size, 0.0, *norm_args)

    nq, nkv, d = c.num_query_heads, c.num_kv_heads, c.head_dim
    blocks = -(-max(lengths) // BLOCK_SIZE)
    tables = a.int32(np.arange(count * blocks).reshape(count, blocks))
    q, qgkv = a.filled(tokens, nq, d), a.filled(tokens, c.attention_in_size)
    k, v = a.filled(2, count * blocks, nkv, BLOCK_SIZE, d)
    attention_args = (q, qgkv, k, v, tables, batch, a.poisoned(tokens, nq * d))
    flops = sum(2.0 * nq * d * length * (length + 1) for length in lengths)
    moved = 2.0 * tokens * (3 * nq + 2 * nkv) * d
    yield case("attention_prefill", moved, flops, *attention_args)
    yield rope(bench, tokens, False)


def decode_cases(bench: Bench, rows: int, contexts: tuple[int, ...]) -> Iterator[Case]:
    yield from embedding_and_norms(bench, rows, True)
    yield from gemms(bench, rows, True)
    for context in contexts:
        yield from decode_mixers(bench, rows, context)
    yield from sampling(bench, rows)


def prefill_cases(bench: Bench, tokens: int) -> Iterator[Case]:
    yield from embedding_and_norms(bench, tokens, False)
    yield from gemms(bench, tokens, False)
    yield from prefill_mixers(bench, [tokens])
    if tokens == 8192:
        yield from prefill_mixers(bench, [128] * 64)
