"""Sampling over rows of fp32 logits: the reference of `Ops.sample`.

A row's log-probabilities are of its raw logits. Penalties, biases and masks change the logits that
an id is chosen by (see `logit_adjustments`). A row's result depends on that row alone, what its
slot holds and (seed, position), and it is stated in integers so that any backend can repeat it
whatever order it adds in:

    mass      m = floor(exp((logit - max) / temperature) * 2**40): fp32 up to the exp, then a 64-bit
              integer. Integer sums do not depend on their order. Temperatures are at least 1e-30.
    top-k     keeps the ids whose logit is at least the k-th largest logit (ties are all kept).
    top-p     of what is left, keeps the ids whose mass is at least the smallest mass that is needed
              to reach floor(top_p * sum), largest first (ties are all kept).
    min-p     keeps the ids with exp(...) >= min_p; the largest is exp(0) = 1.
    draw      r = the first 64 bits of Philox-4x32-10(key = seed, counter = position);
              target = floor(r * sum / 2**64); the id is the first, in id order, at which the
              running sum of the kept masses exceeds the target (inverse CDF).

Inverse CDF rather than Gumbel-max: one random number a row instead of one an id, no second
transcendental function, and the only rounding that two backends can disagree on is exp's.
Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...forward_batch import PENALTIES, SampleBatch
from ...ops.base import NOT_FINITE, NOTHING_ALLOWED
from ...sampling_params import MAX_LOGPROBS
from . import logit_adjustments

MASS_ONE = float(1 << 40)
"""The mass of the likeliest id. 2**24 ids of it still fit 64 bits; less than 2**-40 of it is 0."""

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]

_LOW = np.uint64(0xFFFFFFFF)
_SHIFT = np.uint64(32)
_PHILOX_MULTIPLIERS = np.array([[0xD2511F53], [0xCD9E8D57]], np.uint64)
_PHILOX_KEY_STEPS = np.array([[0x9E3779B9], [0xBB67AE85]], np.uint64)


def philox_4x32(key: U64, even: U64, odd: U64) -> tuple[U64, U64]:
    """Ten rounds of Philox-4x32; every 32-bit word is the low half of a uint64.

    key [2, B]: words 0 and 1; even [2, B]: counter words 0 and 2; odd [2, B]: words 1 and 3.
    Returns the output words as (even, odd).
    """
    for _ in range(10):
        products = even * _PHILOX_MULTIPLIERS
        even = (products >> _SHIFT)[::-1] ^ odd ^ key
        odd = (products & _LOW)[::-1]
        key = (key + _PHILOX_KEY_STEPS) & _LOW
    return even, odd


def random_bits(seeds: U64, positions: U64) -> U64:
    """The 64 random bits of each (seed, position): word 0 low, word 1 high. All uint64 [B]."""
    zeros = np.zeros_like(positions)
    even, odd = philox_4x32(
        np.stack([seeds & _LOW, seeds >> _SHIFT]),
        np.stack([positions & _LOW, zeros]),
        np.stack([positions >> _SHIFT, zeros]),
    )
    bits: U64 = even[0] | (odd[0] << _SHIFT)
    return bits


def masses(weights: F32) -> U64:
    """Weights in [0, 1] as fixed-point integers, see the module docstring. fp32 [N] -> [N]."""
    return (weights.astype(np.float64) * MASS_ONE).astype(np.uint64)


def draw_id(row: F32, temperature: float, top_k: int, top_p: float, min_p: float, bits: int) -> int:
    """Draws one id from a finite row fp32 [N] with temperature > 0. `bits`: 64 random bits."""
    with np.errstate(over="ignore"):  # a tiny temperature makes -inf of all but the largest
        weights = np.exp((row - row.max()) / np.float32(max(temperature, 1e-30)), dtype=np.float32)
    if 0 < top_k < len(row):
        weights[row < np.partition(row, -top_k)[-top_k]] = 0.0
    mass = masses(weights)
    if top_p < 1.0:
        ordered = masses(np.sort(weights)[::-1])
        cumulative = np.cumsum(ordered)
        # fp32 * 2**63 is an integer, so this is floor(top_p * sum) without rounding
        needed = (2 * int(cumulative[-1]) * int(float(top_p) * 2.0**63)) >> 64
        last = int(np.searchsorted(cumulative, np.uint64(needed), side="left"))
        mass[mass < ordered[last]] = 0
    if min_p > 0.0:
        mass[weights < np.float32(min_p)] = 0
    cumulative = np.cumsum(mass)
    target = (bits * int(cumulative[-1])) >> 64
    return int(np.searchsorted(cumulative, np.uint64(target), side="right"))


def log_normalizer(row: F32) -> tuple[np.float32, np.float32]:
    """(max, log(sum(exp(row - max)))) of a finite row fp32 [N], in the integers above."""
    largest = row.max()
    with np.errstate(over="ignore"):
        total = int(masses(np.exp(row - largest, dtype=np.float32)).sum())
    return largest, np.float32(np.log(total / MASS_ONE))


def top_ids(row: F32, count: int) -> npt.NDArray[np.int64]:
    """The ids of the `count` largest of fp32 [N], largest first, equal ones by id."""
    if count >= len(row):
        candidates = np.arange(len(row))
    else:
        candidates = np.flatnonzero(row >= np.partition(row, -count)[-count])
    order = np.argsort(-row[candidates], kind="stable")
    return candidates[order[:count]]


def sample(
    logits: F32,
    batch: SampleBatch,
    next_ids: I32,
    out_ids: I32,
    out_logprobs: F32,
    out_top_ids: I32,
    out_top_logprobs: F32,
) -> None:
    """`Ops.sample`; the mapping from logits and seed to an id is in the module docstring.

    Log-probabilities are over the ids below vocab_limit. With fewer than 20 of those the rest of a
    row of out_top_ids is -1 and of out_top_logprobs -inf. A failed row (id below 0) leaves 0 in
    next_ids, so that a step already issued stays within the embedding.
    """
    num_rows = len(batch.rows)
    limit = batch.vocab_limit
    params = batch.params
    slots = batch.state_slots
    raw = logits[batch.rows, :limit]
    # min and max carry NaN along, so the pair is finite only if the whole row is
    finite = np.isfinite(raw.max(axis=1)) & np.isfinite(raw.min(axis=1))
    failures = np.where(finite, 0, NOT_FINITE)
    rows = _adjusted(raw, batch, finite)
    ids = rows.argmax(axis=1)
    failures[finite & (rows.max(axis=1) == -np.inf)] = NOTHING_ALLOWED
    good = failures == 0

    temperature = params.temperature[slots]
    drawn = np.flatnonzero(good & (temperature > 0.0))
    if len(drawn):
        bits = random_bits(params.seed[slots[drawn]], batch.positions[drawn].astype(np.uint64))
        for i, row_bits in zip(drawn.tolist(), bits.tolist(), strict=True):
            slot = slots[i]
            ids[i] = draw_id(
                rows[i],
                float(temperature[i]),
                int(params.top_k[slot]),
                float(params.top_p[slot]),
                float(params.min_p[slot]),
                row_bits,
            )

    num_logprobs = params.num_logprobs[slots]
    for i in np.flatnonzero(good & (num_logprobs >= 0)).tolist():
        largest, log_total = log_normalizer(raw[i])
        out_logprobs[i] = (raw[i, ids[i]] - largest) - log_total
        top = top_ids(raw[i], MAX_LOGPROBS)
        out_top_ids[i, : len(top)] = top
        out_top_logprobs[i, : len(top)] = (raw[i, top] - largest) - log_total
        out_top_ids[i, len(top) :] = -1
        out_top_logprobs[i, len(top) :] = -np.inf

    if batch.features is not None and params.adjustments is not None:
        for i in np.flatnonzero(good & (batch.features & PENALTIES > 0)).tolist():
            logit_adjustments.count_id(int(ids[i]), int(slots[i]), params.adjustments)
    next_ids[slots] = np.where(good, ids, 0)
    out_ids[:num_rows] = np.where(good, ids, failures)


def _adjusted(raw: F32, batch: SampleBatch, finite: npt.NDArray[np.bool_]) -> F32:
    """The logits that ids are chosen by: `raw` itself where no row has a feature or a mask."""
    zeros = np.zeros(len(raw), np.int32)
    features = zeros if batch.features is None else batch.features
    mask_rows = zeros - 1 if batch.mask_rows is None else batch.mask_rows
    changed = np.flatnonzero(finite & ((features != 0) | (mask_rows >= 0)))
    if not len(changed):
        return raw
    rows = raw.copy()
    for i in changed.tolist():
        mask = None
        if mask_rows[i] >= 0:
            assert batch.masks is not None
            mask = batch.masks[mask_rows[i]]
        rows[i] = logit_adjustments.adjust(
            raw[i], int(features[i]), int(batch.state_slots[i]), batch.params.adjustments, mask
        )
    return rows
