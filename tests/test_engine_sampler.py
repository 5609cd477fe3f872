"""The sampling op and the parameter arrays: which ids may be drawn, how often, and nothing of it
dependent on the rest of the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from deltaserve.engine.forward_batch import SampleBatch, SampleParams
from deltaserve.engine.ops.numpy import sampling

NUM_SLOTS = 8
VOCAB = 100


def sample_params(**by_name: Any) -> SampleParams:
    """Arrays of NUM_SLOTS; a scalar is every slot's value."""
    defaults = {
        "temperature": (1.0, np.float32),
        "top_p": (1.0, np.float32),
        "min_p": (0.0, np.float32),
        "top_k": (0, np.int32),
        "seed": (7, np.uint64),
        "num_logprobs": (-1, np.int32),
    }
    return SampleParams(
        **{
            name: np.broadcast_to(np.asarray(by_name.get(name, value), dtype), NUM_SLOTS).copy()
            for name, (value, dtype) in defaults.items()
        }
    )


@dataclass
class Sampled:
    ids: list[int]
    logprobs: np.ndarray
    top_ids: np.ndarray
    top_logprobs: np.ndarray
    next_ids: np.ndarray


def run(
    logits: np.ndarray,
    params: SampleParams,
    slots: list[int] | None = None,
    positions: list[int] | None = None,
    rows: list[int] | None = None,
    limit: int = VOCAB,
) -> Sampled:
    n = len(logits) if rows is None else len(rows)
    out = Sampled(
        [],
        np.full(n, np.nan, np.float32),
        np.full((n, 20), -7, np.int32),
        np.full((n, 20), np.nan, np.float32),
        np.full(NUM_SLOTS, -7, np.int32),
    )
    ids = np.full(n, -7, np.int32)
    batch = SampleBatch(
        rows=np.array(range(n) if rows is None else rows, np.int32),
        state_slots=np.array(range(n) if slots is None else slots, np.int32),
        positions=np.array([5] * n if positions is None else positions, np.int32),
        params=params,
        vocab_limit=limit,
    )
    sampling.sample(
        logits.copy(), batch, out.next_ids, ids, out.logprobs, out.top_ids, out.top_logprobs
    )
    out.ids = ids.tolist()
    return out


def draws(row: np.ndarray, count: int, **params: Any) -> np.ndarray:
    """The ids of `count` positions of one sequence."""
    return np.array(
        [run(row[None], sample_params(**params), positions=[p]).ids[0] for p in range(count)]
    )


def random_logits(rows: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 3, (rows, VOCAB)).astype(np.float32)


def log_softmax(row: np.ndarray) -> np.ndarray:
    row = row.astype(np.float64)
    row = row - row.max()
    return row - np.log(np.exp(row).sum())


# ---- the generator ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ("00000000 00000000 00000000 00000000", "00000000 00000000",
         "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff",
         "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0",
         "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
)  # fmt: skip
def test_philox_known_answers(counter: str, key: str, expected: str) -> None:
    """The vectors published with Random123."""

    def words(text: str) -> list[int]:
        return [int(word, 16) for word in text.split()]

    def column(*values: int) -> np.ndarray:
        return np.array(values, np.uint64)[:, None]

    c = words(counter)
    even, odd = sampling.philox_4x32(column(*words(key)), column(c[0], c[2]), column(c[1], c[3]))
    assert [int(w[0]) for w in (even[0], odd[0], even[1], odd[1])] == words(expected)


def test_random_bits_depend_on_seed_and_position() -> None:
    seeds = np.array([0, 0, 1, 2**63, 2**64 - 1], np.uint64)
    bits = sampling.random_bits(seeds, np.array([0, 1, 0, 0, 0], np.uint64))
    assert len(set(bits.tolist())) == 5
    assert bits[0] == 0xE169C58D6627E8D5


# ---- greedy -------------------------------------------------------------------------------------


def test_greedy_takes_the_smallest_of_equal_ids() -> None:
    logits = np.zeros((2, VOCAB), np.float32)
    logits[0, [40, 17, 99]] = 2.5
    assert run(logits, sample_params(temperature=0.0)).ids == [17, 0]


def test_rows_go_to_their_slots() -> None:
    logits = random_logits(3)
    out = run(logits, sample_params(temperature=0.0), slots=[6, 0, 3], rows=[2, 0, 1])
    assert out.ids == [int(logits[r].argmax()) for r in (2, 0, 1)]
    assert out.next_ids[[6, 0, 3]].tolist() == out.ids
    assert (out.next_ids[[1, 2, 4, 5, 7]] == -7).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ids_from_the_limit_on_are_never_sampled(temperature: float) -> None:
    logits = random_logits(4)
    logits[:, 90:] = [[50.0], [np.nan], [np.inf], [-np.inf]]
    out = run(logits, sample_params(temperature=temperature, num_logprobs=20), limit=90)
    alone = run(
        np.ascontiguousarray(logits[:, :90]),
        sample_params(temperature=temperature, num_logprobs=20),
        limit=90,
    )
    assert all(0 <= id_ < 90 for id_ in out.ids)
    assert out.ids == alone.ids
    assert (out.top_ids < 90).all()
    np.testing.assert_array_equal(out.logprobs, alone.logprobs)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_fails_alone(bad: float, temperature: float) -> None:
    logits = random_logits(3)
    params = sample_params(temperature=temperature, num_logprobs=5)
    good = run(logits, params)
    logits[1, 33] = bad
    out = run(logits, params)
    assert out.ids == [good.ids[0], -1, good.ids[2]]
    assert out.next_ids[:3].tolist() == [good.ids[0], 0, good.ids[2]]
    np.testing.assert_array_equal(out.logprobs[[0, 2]], good.logprobs[[0, 2]])


# ---- which ids may be drawn ---------------------------------------------------------------------


def kept_ids(row: np.ndarray, temperature: float, k: int, top_p: float, min_p: float) -> set[int]:
    """The documented order, in float64 and by sorting."""
    p = np.exp(log_softmax(row / temperature))
    order = np.argsort(-p)
    if k:
        order = order[:k]
    p_kept = p[order] / p[order].sum()
    before = np.cumsum(p_kept) - p_kept
    order = order[before < top_p]
    order = order[p[order] >= min_p * p.max()]
    return set(order.tolist())


@pytest.mark.parametrize(
    ("temperature", "k", "top_p", "min_p"),
    [
        (1.0, 3, 1.0, 0.0),
        (1.0, 0, 0.6, 0.0),
        (1.0, 0, 1.0, 0.2),
        (1.0, 6, 0.8, 0.0),
        (1.0, 6, 0.9, 0.3),
        (2.0, 5, 0.7, 0.1),
        (1.0, 0, 1e-6, 0.0),
        (1.0, 0, 1.0, 1.0),
        (0.3, 500, 0.9, 0.0),
    ],
)
def test_exactly_the_filtered_ids_are_drawn(
    temperature: float, k: int, top_p: float, min_p: float
) -> None:
    row = random_logits(1, seed=3)[0]
    drawn = draws(row, 800, temperature=temperature, top_k=k, top_p=top_p, min_p=min_p)
    allowed = kept_ids(row, temperature, k, top_p, min_p)
    likely = {i for i in allowed if np.exp(log_softmax(row / temperature))[i] > 0.02}
    assert likely <= set(drawn.tolist()) <= allowed


def test_ties_at_a_threshold_are_kept() -> None:
    row = np.full(VOCAB, -50.0, np.float32)
    row[[3, 8, 60]] = 1.0
    assert set(draws(row, 100, top_k=2).tolist()) == {3, 8, 60}
    assert set(draws(row, 100, top_p=0.1).tolist()) == {3, 8, 60}


@pytest.mark.parametrize("temperature", [1e-40, 1e-5])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    row = random_logits(1)[0]
    assert set(draws(row, 20, temperature=temperature).tolist()) == {int(row.argmax())}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_ids_are_drawn_as_often_as_the_distribution_says(temperature: float) -> None:
    row = random_logits(1, seed=5)[0, :20].copy()
    count = 4000
    logits = np.broadcast_to(row, (NUM_SLOTS, 20))
    params = sample_params(temperature=temperature, seed=np.arange(NUM_SLOTS))
    drawn: list[int] = []
    for position in range(count // NUM_SLOTS):
        drawn += run(logits, params, positions=[position] * NUM_SLOTS, limit=20).ids
    p = np.exp(log_softmax(row / temperature))
    frequency = np.bincount(drawn, minlength=20) / count
    # five standard deviations of a binomial; the draws are fixed, so this passes or it does not
    assert (np.abs(frequency - p) <= 5 * np.sqrt(p * (1 - p) / count) + 1 / count).all()


def test_largest_random_bits_draw_the_last_kept_id() -> None:
    row = random_logits(1)[0]
    kept = np.flatnonzero(sampling.masses(np.exp(row - row.max(), dtype=np.float32)))
    assert sampling.draw_id(row, 1.0, 0, 1.0, 0.0, 2**64 - 1) == kept[-1]
    assert sampling.draw_id(row, 1.0, 0, 1.0, 0.0, 0) == kept[0]


# ---- independence and reproducibility -----------------------------------------------------------


def test_a_row_does_not_depend_on_the_batch() -> None:
    rng = np.random.default_rng(1)
    logits = random_logits(NUM_SLOTS)
    params = sample_params(
        temperature=rng.choice([0.0, 0.7, 1.3], NUM_SLOTS),
        top_k=rng.choice([0, 5, 50], NUM_SLOTS),
        top_p=rng.choice([1.0, 0.8], NUM_SLOTS),
        min_p=rng.choice([0.0, 0.05], NUM_SLOTS),
        seed=rng.integers(0, 2**64, NUM_SLOTS, np.uint64),
        num_logprobs=rng.choice([-1, 0, 20], NUM_SLOTS),
    )
    for position in range(20):
        together = run(logits, params, positions=[position + s for s in range(NUM_SLOTS)])
        for s in range(NUM_SLOTS):
            alone = run(logits, params, slots=[s], positions=[position + s], rows=[s])
            assert alone.ids == [together.ids[s]]
            np.testing.assert_array_equal(alone.logprobs[0], together.logprobs[s])
            np.testing.assert_array_equal(alone.top_logprobs[0], together.top_logprobs[s])


def test_seed_and_position_fix_the_draw() -> None:
    row = random_logits(1)[0] / 5
    first, again = draws(row, 60, seed=11), draws(row, 60, seed=11)
    other = draws(row, 60, seed=12)
    assert (first == again).all()
    assert (first != other).sum() > 40
    assert len(set(first.tolist())) > 20


# ---- log-probabilities --------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_logprobs_are_of_the_raw_logits(temperature: float) -> None:
    """fp32 differences and a normaliser within 2**-30 of the exact one: 2e-6 at these values."""
    logits = random_logits(5)
    params = sample_params(temperature=temperature, top_k=4, num_logprobs=3)
    out = run(logits, params)
    for row, id_, logprob, top, top_logprobs in zip(
        logits, out.ids, out.logprobs, out.top_ids, out.top_logprobs, strict=True
    ):
        expected = log_softmax(row)
        np.testing.assert_allclose(logprob, expected[id_], atol=2e-6)
        assert top.tolist() == np.argsort(-expected, kind="stable")[:20].tolist()
        np.testing.assert_allclose(top_logprobs, expected[top], atol=2e-6)


def test_equal_alternatives_are_listed_by_id() -> None:
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, 70] = 1.0
    out = run(logits, sample_params(num_logprobs=20))
    assert out.top_ids[0].tolist() == [70, *range(19)]


def test_fewer_ids_than_alternatives() -> None:
    out = run(random_logits(1), sample_params(num_logprobs=20), limit=6)
    assert sorted(out.top_ids[0, :6].tolist()) == list(range(6))
    assert (out.top_ids[0, 6:] == -1).all()
    assert (out.top_logprobs[0, 6:] == -np.inf).all()


def test_rows_without_logprobs_are_left_alone() -> None:
    out = run(random_logits(2), sample_params(num_logprobs=[-1, 0, 0, 0, 0, 0, 0, 0]))
    assert np.isnan(out.logprobs[0])
    assert np.isfinite(out.logprobs[1])
