"""Equal bits of a sequence's results whatever runs beside it and however its prompt is cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from deltaserve.engine.ops.cuda.ops import CudaOps
from tests.batches import decode_batch, prefill_batch
from tools.gpu_arrays import Arrays
from tools.gpu_gemm import differing_rows
from tools.gpu_op_checks import BLOCK_SIZE, EPS, HEAD, D, on_device, paged_cache

NQ, NKV, HK, HV = 16, 4, 16, 32
CHANNELS = (2 * HK + HV) * HEAD
LENGTH = 1100
CUTS = ([0, 64, 1100], [0, 576, 640, 1088, 1100], [0, 1024, 1100])
TABLE_SLOT, OTHER_SLOT = 0, 1

Counts = Iterator[tuple[str, int]]


def prompt_cuts(ops: CudaOps, a: Arrays) -> Counts:
    """Attention, convolution and delta rule of one prompt: whole, against in chunks, the first of
    which runs beside another sequence."""
    k, v, tables = paged_cache(a, [LENGTH, 200], [TABLE_SLOT, OTHER_SLOT], NKV)
    q, qgkv = a.act(LENGTH + 200, NQ, D), a.act(LENGTH + 200, (2 * NQ + 2 * NKV) * D)
    qkvzba = a.act(LENGTH + 200, CHANNELS + HV * (HEAD + 2))
    conv_weight, a_log, dt_bias = a.act(CHANNELS, 4), a.fp32(HV), a.fp32(HV)

    def run(spans: list[tuple[int, int]], first: int, states: tuple[Any, Any]) -> list[Any]:
        """Results of the first sequence's tokens, which are rows `first` and on."""
        batch = on_device(a, prefill_batch(spans, [TABLE_SLOT, OTHER_SLOT][: len(spans)]))
        rows = slice(first, first + batch.num_tokens)
        attended = a.poisoned(batch.num_tokens, NQ * D)
        ops.attention_prefill(q[rows], qgkv[rows], k, v, tables, batch, attended)
        qkv, out = a.poisoned(batch.num_tokens, CHANNELS), a.poisoned(batch.num_tokens, HV * HEAD)
        conv_state, state = states
        ops.causal_conv1d(qkvzba[rows], conv_weight, batch, conv_state, qkv)
        ops.delta_rule_prefill(qkv, qkvzba[rows], a_log, dt_bias, batch, state, out)
        own = spans[0][1] - spans[0][0]
        return [attended[:own], qkv[:own], out[:own]]

    def fresh() -> tuple[Any, Any]:
        return a.act(2, 4, CHANNELS), a.fp32(2, HV, HEAD, HEAD)

    states = fresh()
    whole = run([(0, LENGTH)], 0, states)
    for cuts in CUTS:
        own_states = fresh()
        counts = np.zeros(3, int)
        for begin, end in itertools.pairwise(cuts):
            # the other sequence's rows follow: those of the longest prompt, whatever they hold
            spans = [(begin, end), (0, 100)] if begin == 0 else [(begin, end)]
            parts = run(spans, begin, own_states)
            counts += [
                differing_rows(part, wanted[begin:end])
                for part, wanted in zip(parts, whole, strict=True)
            ]
        for name, count in zip(("attention", "conv", "delta rule"), counts, strict=True):
            yield f"{name} cut at {cuts[1:-1]}", int(count)
        same_state = differing_rows(own_states[1][TABLE_SLOT], states[1][TABLE_SLOT])
        yield f"state cut at {cuts[1:-1]}", same_state


def decode_company(ops: CudaOps, a: Arrays) -> Counts:
    """Decode attention and the delta net: each row alone against the row in a batch of 8."""
    contexts, slots = [1, 63, 64, 65, 900, 4096, 4097, 9000], [3, 1, 0, 2, 7, 6, 5, 4]
    rows = len(slots)
    k, v, tables = paged_cache(a, contexts, slots, NKV)
    q, qgkv = a.act(rows, NQ, D), a.act(rows, (2 * NQ + 2 * NKV) * D)
    qkvzba = a.act(rows, CHANNELS + HV * (HEAD + 2))
    weights = a.act(CHANNELS, 4), a.fp32(HV), a.fp32(HV), a.fp32(HEAD)
    conv_state, state = a.act(rows, 4, CHANNELS), a.fp32(rows, HV, HEAD, HEAD)
    next_ids = a.int32(range(rows))

    def run(picked: list[int]) -> tuple[Any, Any, Any]:
        batch = on_device(
            a, decode_batch([contexts[i] - 1 for i in picked], [slots[i] for i in picked])
        )
        at = a.int32(picked)
        attended, out = a.poisoned(len(picked), NQ * D), a.poisoned(len(picked), HV * HEAD)
        ops.prepare_decode(batch, next_ids, tables, BLOCK_SIZE)
        ops.attention_decode(q[at], qgkv[at], k, v, tables, batch, attended)
        states = conv_state.copy(), state.copy()
        ops.delta_net_decode(qkvzba[at], *weights, EPS, batch, *states, out)
        return attended, out, states[1]

    attended, out, after = run(list(range(rows)))
    for i in range(rows):
        alone = run([i])
        what = f"context {contexts[i]}"
        yield f"attention {what}", differing_rows(alone[0], attended[i : i + 1])
        yield f"delta net {what}", differing_rows(alone[1], out[i : i + 1])
        yield f"state {what}", differing_rows(alone[2][slots[i]], after[slots[i]])
