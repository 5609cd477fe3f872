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
COMPANY = (1, 12, 0)
"""Other prompts beside the first piece of each of CUTS: few, and enough to fill the card."""
OTHER_LENGTH = 100
SNAPSHOTS = {64: 13, 576: 14, 1024: 15}
"""Positions and slots; the prompt has slot 0, those beside it the next ones."""

Counts = Iterator[tuple[str, int]]


def prompt_cuts(ops: CudaOps, a: Arrays) -> Counts:
    """Attention, convolution and delta rule of one prompt: whole, against in pieces, the first of
    which runs beside other prompts; and the whole prompt's snapshots against the states of the
    pieces that end there."""
    slots = list(range(1 + max(COMPANY)))
    tokens = LENGTH + max(COMPANY) * OTHER_LENGTH
    k, v, tables = paged_cache(a, [LENGTH, *[OTHER_LENGTH] * max(COMPANY)], slots, NKV)
    q, qgkv = a.act(tokens, NQ, D), a.act(tokens, (2 * NQ + 2 * NKV) * D)
    qkvzba = a.act(tokens, CHANNELS + HV * (HEAD + 2))
    conv_weight, a_log, dt_bias = a.act(CHANNELS, 4), a.fp32(HV), a.fp32(HV)

    def run(piece: tuple[int, int], others: int, states: list[Any], snapshots: Any) -> list[Any]:
        """Results of the prompt's tokens. The other prompts' rows follow: those of the longest
        prompt, whatever they hold."""
        spans = [piece, *[(0, OTHER_LENGTH)] * others]
        pairs = [snapshots, *[[]] * others]
        batch = on_device(a, prefill_batch(spans, slots[: len(spans)], snapshots=pairs))
        rows = slice(piece[0], piece[0] + batch.num_tokens)
        attended = a.poisoned(batch.num_tokens, NQ * D)
        ops.attention_prefill(q[rows], qgkv[rows], k, v, tables, batch, attended)
        qkv, out = a.poisoned(batch.num_tokens, CHANNELS), a.poisoned(batch.num_tokens, HV * HEAD)
        conv_state, state = states
        ops.causal_conv1d(qkvzba[rows], conv_weight, batch, conv_state, qkv)
        ops.delta_rule_prefill(qkv, qkvzba[rows], a_log, dt_bias, batch, state, out)
        own = piece[1] - piece[0]
        return [attended[:own], qkv[:own], out[:own]]

    def fresh() -> list[Any]:
        size = 1 + max(SNAPSHOTS.values())
        return [a.act(size, 4, CHANNELS), a.fp32(size, HV, HEAD, HEAD)]

    states = fresh()
    whole = run((0, LENGTH), 0, states, list(SNAPSHOTS.items()))
    for cuts, company in zip(CUTS, COMPANY, strict=True):
        own_states = fresh()
        counts = np.zeros(4, int)
        for begin, end in itertools.pairwise(cuts):
            parts = run((begin, end), company if begin == 0 else 0, own_states, [])
            counts[:3] += [
                differing_rows(part, wanted[begin:end])
                for part, wanted in zip(parts, whole, strict=True)
            ]
            if end == LENGTH or end in SNAPSHOTS:
                slot = SNAPSHOTS.get(end, 0)
                counts[3] += sum(
                    differing_rows(mine[0], wanted[slot])
                    for mine, wanted in zip(own_states, states, strict=True)
                )
        for name, count in zip(("attention", "conv", "delta rule", "states"), counts, strict=True):
            yield f"{name} cut at {cuts[1:-1]}, {company} others", int(count)


BATCHES = (1, 2, 3, 5, 8, 17, 32, 64, 128, 256)
PADDING = 3
BORDERS = (16, 64, 128, 192, 256, 512, 1024, 2048, 4096, 8192, 16_384, 32_768)
"""Decode attention goes on to another group of tokens, tile or split at these positions, or cuts
longer contexts into longer splits."""


class _DecodeRows:
    """As many sequences as the largest batch, about to decode: every border from both sides, then
    random contexts. `run` gives results for some of them, without changing their states."""

    def __init__(self, ops: CudaOps, a: Arrays) -> None:
        rows = max(BATCHES)
        near = sorted({1, 2, *(b + d for b in BORDERS for d in (-1, 0, 1))})
        self.contexts = np.array([*near, *a.rng.integers(1, 2000, rows - len(near))])
        blocks = -(-self.contexts // BLOCK_SIZE)
        tables = np.full((rows, blocks.max()), 2**30, np.int32)
        free = iter(a.rng.permutation(blocks.sum()).tolist())
        for slot, count in enumerate(blocks):
            tables[slot, :count] = [next(free) for _ in range(count)]
        self._ops, self._a, self._tables = ops, a, a.cupy.asarray(tables)
        self._k, self._v = (a.filled(blocks.sum(), NKV, BLOCK_SIZE, D) for _ in "kv")
        self._q, self._qgkv = a.act(rows, NQ, D), a.act(rows, (2 * NQ + 2 * NKV) * D)
        self._qkvzba = a.act(rows, CHANNELS + HV * (HEAD + 2))
        self._weights = a.act(CHANNELS, 4), a.fp32(HV), a.fp32(HV), a.fp32(HEAD)
        self._next_ids = a.int32(range(rows))
        self.state = a.filled(rows, HV, HEAD, HEAD, dtype=np.float32)
        self.conv_state = a.act(rows, 4, CHANNELS)

    def run(self, picked: list[int], padding: int = 0) -> list[Any]:
        """Attention, delta net, both states. Rows of padding come after those picked."""
        a, ops, rows = self._a, self._ops, len(picked) + padding
        positions = [*(self.contexts[picked] - 1).tolist(), *[0] * padding]
        batch = on_device(a, decode_batch(positions, [*picked, *[-1] * padding]))
        at = a.int32([*picked, *[0] * padding])
        attended, out = a.poisoned(rows, NQ * D), a.poisoned(rows, HV * HEAD)
        ops.prepare_decode(batch, self._next_ids, self._tables, BLOCK_SIZE)
        ops.attention_decode(
            self._q[at], self._qgkv[at], self._k, self._v, self._tables, batch, attended
        )
        states = self.conv_state.copy(), self.state.copy()
        ops.delta_net_decode(self._qkvzba[at], *self._weights, EPS, batch, *states, out)
        return [attended[: len(picked)], out[: len(picked)], *states]


def decode_company(ops: CudaOps, a: Arrays) -> Counts:
    """Decode attention and the delta net: each row alone against the row in batches of all sizes,
    padded or not; and the states of sequences that are not in the batch."""
    rows = _DecodeRows(ops, a)
    everyone = list(range(max(BATCHES)))
    alone = [[result.copy() for result in _own(rows.run([i]), 0, i)] for i in everyone]
    for size in BATCHES:
        picked = a.rng.permutation(everyone)[:size].tolist()
        results = rows.run(picked, PADDING if size % 2 else 0)
        counts = np.zeros(4, int)
        for row, slot in enumerate(picked):
            pairs = zip(_own(results, row, slot), alone[slot], strict=True)
            counts += [differing_rows(mine, wanted) for mine, wanted in pairs]
        for name, count in zip(
            ("attention", "delta net", "conv state", "state"), counts, strict=True
        ):
            yield f"{name} batch {size}", int(count)
        others = a.int32(sorted({*everyone} - {*picked}))
        for name, after, before in (
            ("conv states", results[2], rows.conv_state),
            ("states", results[3], rows.state),
        ):
            yield f"other {name} batch {size}", differing_rows(after[others], before[others])


def _own(results: list[Any], row: int, slot: int) -> list[Any]:
    """What `run` gave for one row."""
    return [results[0][row], results[1][row], results[2][slot], results[3][slot]]
