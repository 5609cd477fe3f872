"""Each CUDA op against the NumPy op with bf16 rounding: fresh random inputs, poisoned outputs.

A check returns (what, relative error, tolerance) tuples. Tolerances: 4e-3 where both sides round at
the same points (a sum on a rounding border differs by one bf16 step, 2^-8, in few places); 8e-3
where the kernel rounds more operands to bf16 than the reference (attention's weights); 2e-2 for the
delta rule (bf16 operands through several products); 1e-4 for fp32 state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from deltaserve.engine.forward_batch import SampleBatch, SampleParams
from deltaserve.engine.ops.cuda.ops import CudaOps
from deltaserve.engine.ops.numpy.ops import NumpyOps
from tests.batches import decode_batch, prefill_batch
from tools.gpu_arrays import Arrays, relative_error

EPS = 1e-6
HEAD, D, BLOCK_SIZE = 128, 256, 64
SAME, WEIGHTS, DELTA, STATE = 4e-3, 8e-3, 2e-2, 1e-4
REFERENCE = NumpyOps(round_bf16=True)

Result = Iterator[tuple[str, float, float]]


def on_device(arrays: Arrays, batch: Any) -> Any:
    """The batch with its arrays on the GPU."""
    values = {
        name: arrays.cupy.asarray(value) if isinstance(value, np.ndarray) else value
        for name, value in vars(batch).items()
    }
    return type(batch)(**values)


def check_embedding(ops: CudaOps, a: Arrays) -> Result:
    table, rows, out = a.act(1000, 2560), a.int32([999, 0, 17, 17]), a.poisoned(4, 2560)
    ops.embed(rows, table, out)
    yield "4 rows", relative_error(a.host(out), a.host(table)[[999, 0, 17, 17]]), 0.0


def check_norm(ops: CudaOps, a: Arrays) -> Result:
    for size in (1024, 2560, 5120):
        x, weight, out = a.act(33, size), a.act(size), a.poisoned(33, size)
        ops.rms_norm(x, weight, EPS, out)
        expected = np.empty((33, size), np.float32)
        REFERENCE.rms_norm(a.host(x), a.host(weight), EPS, expected)
        yield f"rms H={size}", relative_error(a.host(out), expected), SAME
        for segments in (0, 1, 2, 4):
            residual, out = a.act(33, size), a.poisoned(33, size)
            expected_residual = a.host(residual)
            if segments:
                branch = a.fp32(segments, 33, size)
                host = a.host(branch)
                ops.add_rms_norm_partials(branch, residual, weight, EPS, out)
                REFERENCE.add_rms_norm_partials(
                    host, expected_residual, a.host(weight), EPS, expected
                )
            else:
                branch = a.act(33, size)
                ops.add_rms_norm(branch, residual, weight, EPS, out)
                REFERENCE.add_rms_norm(
                    a.host(branch), expected_residual, a.host(weight), EPS, expected
                )
            what = f"add S={segments} H={size}"
            yield what, relative_error(a.host(out), expected), SAME
            yield what + " residual", relative_error(a.host(residual), expected_residual), 0.0


def check_rope(ops: CudaOps, a: Arrays) -> Result:
    """The last row is padding: nothing is written to the caches for it."""
    inv_freq = (1e7 ** (-np.arange(32) / 32)).astype(np.float32)
    for nq, nkv in ((8, 2), (16, 4), (24, 4)):
        tokens = 70
        positions = a.rng.integers(0, 262_144, tokens + 1).astype(np.int32)
        slots = a.rng.permutation(4 * BLOCK_SIZE)[: tokens + 1].astype(np.int32)
        slots[tokens] = -1
        qgkv, q_norm, k_norm = a.act(tokens + 1, (2 * nq + 2 * nkv) * D), a.act(D), a.act(D)
        outs = [
            a.poisoned(tokens + 1, nq, D),
            a.act(4, nkv, BLOCK_SIZE, D),
            a.act(4, nkv, BLOCK_SIZE, D),
        ]
        expected = [a.host(out) for out in outs]
        device = [a.cupy.asarray(x) for x in (inv_freq, positions, slots)]
        ops.qk_norm_rope_write(qgkv, q_norm, k_norm, EPS, *device, *outs)
        rows = a.host(qgkv)[:tokens], a.host(q_norm), a.host(k_norm), EPS, inv_freq
        expected[0] = expected[0][:tokens]
        REFERENCE.qk_norm_rope_write(*rows, positions[:tokens], slots[:tokens], *expected)
        outs[0] = outs[0][:tokens]
        for name, out, wanted in zip("qkv", outs, expected, strict=True):
            yield f"NQ={nq} {name}", relative_error(a.host(out), wanted), SAME


def check_gated_norm(ops: CudaOps, a: Arrays) -> Result:
    for hv in (16, 32, 48):
        x, qkvzba = a.act(33, hv * HEAD), a.act(33, (32 + 2 * hv) * HEAD + 2 * hv)
        weight, out = a.fp32(HEAD), a.poisoned(33, hv * HEAD)
        ops.gated_rms_norm(x, qkvzba, weight, EPS, out)
        expected = np.empty(out.shape, np.float32)
        REFERENCE.gated_rms_norm(a.host(x), a.host(qkvzba), a.host(weight), EPS, expected)
        yield f"HV={hv}", relative_error(a.host(out), expected), SAME


SPANS = [(0, 2), (0, 137), (62, 64), (64, 300), (5, 70), (128, 129)]
SLOTS = [4, 0, 3, 1, 2, 6]
INITIAL_SLOTS = [-1, -1, 3, 5, 2, -1]  # its own, another one, zeros
SNAPSHOTS = [[], [(64, 7), (128, 8)], [(64, 9)], [(128, 10), (192, 11), (256, 12)], [], []]
STATE_SLOTS = 13


def check_conv(ops: CudaOps, a: Arrays) -> Result:
    for hv in (16, 32, 48):
        channels = (32 + hv) * HEAD
        batch = prefill_batch(SPANS, SLOTS, INITIAL_SLOTS, SNAPSHOTS)
        qkvzba = a.act(batch.num_tokens, channels + hv * (HEAD + 2))
        weight, state = a.act(channels, 4), a.act(STATE_SLOTS, 4, channels)
        out = a.poisoned(batch.num_tokens, channels)
        expected_state, expected = a.host(state), np.empty(out.shape, np.float32)
        ops.causal_conv1d(qkvzba, weight, on_device(a, batch), state, out)
        REFERENCE.causal_conv1d(a.host(qkvzba), a.host(weight), batch, expected_state, expected)
        yield f"HV={hv}", relative_error(a.host(out), expected), SAME
        yield f"HV={hv} state", relative_error(a.host(state), expected_state), 0.0


def check_delta_decode(ops: CudaOps, a: Arrays) -> Result:
    for hv in (16, 32, 48):
        channels, rows = (32 + hv) * HEAD, 6
        batch = decode_batch([0, 1, 2, 3, 130, 4097], [5, 0, 2, 1, 3, 4])
        qkvzba, conv_weight = a.act(rows, channels + hv * (HEAD + 2)), a.act(channels, 4)
        weights = a.fp32(hv), a.fp32(hv), a.fp32(HEAD)
        conv_state, state = a.act(6, 4, channels), a.fp32(6, hv, HEAD, HEAD)
        state[5] = 0  # of the row at position 0, which starts from zeros
        expected_conv, expected_state = a.host(conv_state), a.host(state)
        state[5] = np.nan
        out, expected = a.poisoned(rows, hv * HEAD), np.empty((rows, hv * HEAD), np.float32)
        ops.delta_net_decode(
            qkvzba, conv_weight, *weights, EPS, on_device(a, batch), conv_state, state, out
        )
        a_log, dt_bias, norm = map(a.host, weights)
        inputs = a.host(qkvzba), a.host(conv_weight), a_log, dt_bias, norm, EPS, batch
        REFERENCE.delta_net_decode(*inputs, expected_conv, expected_state, expected)
        yield f"HV={hv}", relative_error(a.host(out), expected), SAME
        yield f"HV={hv} state", relative_error(a.host(state), expected_state), STATE
        yield f"HV={hv} conv state", relative_error(a.host(conv_state), expected_conv), 0.0


def paged_cache(a: Arrays, contexts: list[int], slots: list[int], nkv: int) -> tuple[Any, ...]:
    """(k, v, tables) with poison wherever no context reaches."""
    max_blocks = max(contexts) // BLOCK_SIZE + 2
    tables = np.full((max(slots) + 1, max_blocks), 2**30, np.int32)
    count = sum(-(-c // BLOCK_SIZE) for c in contexts)
    k = a.poisoned(count, nkv, BLOCK_SIZE, D)
    v = a.poisoned(count, nkv, BLOCK_SIZE, D)
    free = iter(a.rng.permutation(count).tolist())
    for context, slot in zip(contexts, slots, strict=True):
        for block in range(-(-context // BLOCK_SIZE)):
            tables[slot, block] = physical = next(free)
            rows = min(BLOCK_SIZE, context - block * BLOCK_SIZE)
            k[physical, :, :rows], v[physical, :, :rows] = a.act(2, nkv, rows, D)
    return k, v, a.cupy.asarray(tables)


def check_attention_decode(ops: CudaOps, a: Arrays) -> Result:
    """The longest context has splits in which a warp takes more than 32 groups."""
    for nq, nkv, longest in ((8, 2, 131_200), (16, 4, 20_000), (24, 4, 20_000)):
        contexts, slots = [1, 16, 17, 64, 1000, 4096, 4097, longest], [7, 1, 0, 2, 3, 6, 5, 4]
        k, v, tables = paged_cache(a, contexts, slots, nkv)
        batch = decode_batch([c - 1 for c in contexts], slots)
        device = on_device(a, batch)
        rows = len(slots)
        q, qgkv = a.act(rows, nq, D), a.act(rows, (2 * nq + 2 * nkv) * D)
        out, expected = a.poisoned(rows, nq * D), np.empty((rows, nq * D), np.float32)
        ops.prepare_decode(device, a.int32(range(8)), tables, BLOCK_SIZE)
        REFERENCE.prepare_decode(batch, np.arange(8, dtype=np.int32), a.host(tables), BLOCK_SIZE)
        mapping = a.host(device.slot_mapping)
        yield f"NQ={nq} slots", relative_error(mapping, batch.slot_mapping), 0.0
        ops.attention_decode(q, qgkv, k, v, tables, device, out)
        inputs = a.host(q), a.host(qgkv), a.host(k), a.host(v), a.host(tables), batch
        REFERENCE.attention_decode(*inputs, expected)
        yield f"NQ={nq}", relative_error(a.host(out), expected), WEIGHTS


def check_attention_prefill(ops: CudaOps, a: Arrays) -> Result:
    for nq, nkv in ((8, 2), (16, 4), (24, 4)):
        spans, slots = [(0, 1), (0, 300), (64, 193), (960, 1100)], [3, 0, 1, 2]
        k, v, tables = paged_cache(a, [end for _, end in spans], slots, nkv)
        batch = prefill_batch(spans, slots)
        tokens = batch.num_tokens
        q, qgkv = a.act(tokens, nq, D), a.act(tokens, (2 * nq + 2 * nkv) * D)
        out, expected = a.poisoned(tokens, nq * D), np.empty((tokens, nq * D), np.float32)
        ops.attention_prefill(q, qgkv, k, v, tables, on_device(a, batch), out)
        inputs = a.host(q), a.host(qgkv), a.host(k), a.host(v), a.host(tables), batch
        REFERENCE.attention_prefill(*inputs, expected)
        yield f"NQ={nq}", relative_error(a.host(out), expected), WEIGHTS


def check_delta_rule(ops: CudaOps, a: Arrays) -> Result:
    for hv in (16, 32, 48):
        channels = (32 + hv) * HEAD
        batch = prefill_batch(SPANS, SLOTS, INITIAL_SLOTS, SNAPSHOTS)
        tokens = batch.num_tokens
        qkv, qkvzba = a.act(tokens, channels), a.act(tokens, channels + hv * (HEAD + 2))
        a_log, dt_bias, state = a.fp32(hv), a.fp32(hv), a.fp32(STATE_SLOTS, hv, HEAD, HEAD)
        out, expected = a.poisoned(tokens, hv * HEAD), np.empty((tokens, hv * HEAD), np.float32)
        expected_state = a.host(state)
        ops.delta_rule_prefill(qkv, qkvzba, a_log, dt_bias, on_device(a, batch), state, out)
        inputs = a.host(qkv), a.host(qkvzba), a.host(a_log), a.host(dt_bias), batch
        REFERENCE.delta_rule_prefill(*inputs, expected_state, expected)
        yield f"HV={hv}", relative_error(a.host(out), expected), DELTA
        yield f"HV={hv} state", relative_error(a.host(state), expected_state), DELTA


def check_sample(ops: CudaOps, a: Arrays) -> Result:
    """expf may round otherwise than NumPy's, so an id may differ where a draw falls on a border."""
    vocab, limit, rows = 248_320, 248_077, 32
    logits = (3 * a.rng.standard_normal((rows, vocab))).astype(np.float32)
    logits[:, limit:] = 100.0
    logits[:, ::5] = np.round(logits[:, ::5])
    logits[rows - 1, 5] = np.nan
    r = a.rng
    params = SampleParams(
        temperature=r.choice([0, 0.6, 1.0, 1.5], rows).astype(np.float32),
        top_p=r.choice([1.0, 0.95, 0.5], rows).astype(np.float32),
        min_p=r.choice([0, 0.02], rows).astype(np.float32),
        top_k=r.choice([0, 1, 20, 1000], rows).astype(np.int32),
        seed=r.integers(0, 2**64, rows, np.uint64),
        num_logprobs=r.choice([-1, 0, 20], rows).astype(np.int32),
    )
    rows_of, slots, positions = (r.permutation(rows).astype(np.int32) for _ in range(3))
    batch = SampleBatch(rows_of, slots, positions, params, limit)
    shapes = [(rows,), (rows,), (rows,), (rows, 20), (rows, 20)]
    dtypes = [np.int32, np.int32, np.float32, np.int32, np.float32]
    expected = [np.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    actual = [a.cupy.asarray(x) for x in expected]
    device_params = SampleParams(
        **{n: a.cupy.asarray(x) for n, x in vars(params).items() if x is not None}
    )
    device = on_device(a, replace(batch, params=device_params))
    ops.sample(a.cupy.asarray(logits), device, *actual)
    REFERENCE.sample(logits, batch, *expected)
    got = [a.host(x) for x in actual]
    yield "ids that differ / rows", float(np.mean(got[1] != expected[1])), 0.05
    yield "next ids against ids", float(np.mean(got[0][slots] != np.maximum(got[1], 0))), 0.0
    yield "top ids that differ", float(np.mean(got[3] != expected[3])), 0.0
    yield "top logprobs", relative_error(got[4], expected[4]), 1e-5


def check_token_logprobs(ops: CudaOps, a: Arrays) -> Result:
    vocab, limit, rows = 248_320, 248_077, 40
    logits = (3 * a.rng.standard_normal((rows, vocab))).astype(np.float32)
    logits[:, limit:] = 100.0
    logits[:, ::5] = np.round(logits[:, ::5])
    logits[3, 1::1024] += 40  # the likeliest all in one group
    logits[rows - 1, 5] = np.nan
    targets = a.rng.integers(0, limit, rows, np.int32)
    targets[::4] = logits[::4, :limit].argmax(1)
    shapes = [(rows,), (rows,), (rows, 20), (rows, 20)]
    dtypes = [np.float32, np.int32, np.int32, np.float32]
    expected = [np.zeros(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    actual = [a.cupy.asarray(x) for x in expected]
    ops.token_logprobs(a.cupy.asarray(logits), a.cupy.asarray(targets), limit, 20, *actual)
    REFERENCE.token_logprobs(logits, targets, limit, 20, *expected)
    got = [a.host(x) for x in actual]
    yield "logprobs", relative_error(got[0], expected[0]), 1e-5
    yield "ranks that differ", float(np.mean(got[1] != expected[1])), 0.0
    yield "top ids that differ", float(np.mean(got[2] != expected[2])), 0.0
    yield "top logprobs", relative_error(got[3], expected[3]), 1e-5


CHECKS: dict[str, Callable[[CudaOps, Arrays], Result]] = {
    name.removeprefix("check_"): function
    for name, function in list(globals().items())
    if name.startswith("check_")
}
