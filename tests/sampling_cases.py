"""Random inputs of `Ops.sample` with every feature, for comparing a backend with the NumPy op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from deltaserve.engine.forward_batch import (
    ALLOWED_IDS,
    LISTED_IDS,
    PENALTIES,
    STOPS_FORBIDDEN,
    LogitAdjustments,
    SampleBatch,
    SampleParams,
    mask_words,
)
from deltaserve.engine.logit_adjustments import MAX_LISTED

NUM_FAILING = 3


@dataclass
class Outputs:
    """What `Ops.sample` writes, filled with what it never writes."""

    next_ids: Any
    ids: Any
    logprobs: Any
    top_ids: Any
    top_logprobs: Any

    def arrays(self) -> list[Any]:
        return [self.next_ids, self.ids, self.logprobs, self.top_ids, self.top_logprobs]


def empty_outputs(num_slots: int, rows: int) -> Outputs:
    return Outputs(
        np.full(num_slots, -7, np.int32),
        np.full(rows, -7, np.int32),
        np.full(rows, -7, np.float32),
        np.full((rows, 20), -7, np.int32),
        np.full((rows, 20), -7, np.float32),
    )


def random_bits(rng: np.random.Generator, rows: int, vocab: int, share: float) -> np.ndarray:
    bits = (rng.random((rows, 32 * mask_words(vocab))) < share).astype(np.uint8)
    return np.packbits(bits, axis=1, bitorder="little").view(np.uint32)


def random_adjustments(rng: np.random.Generator, slots: int, vocab: int) -> LogitAdjustments:
    """Every array of every slot holds something, whether or not a row has the feature."""
    counts = rng.choice([0, 0, 0, 1, 2, 9, 65535], (slots, 2 * -(-vocab // 2))).astype(np.uint16)
    num_listed = rng.integers(0, min(MAX_LISTED, vocab // 2), slots)
    num_listed[:2] = [1, min(MAX_LISTED, vocab // 2)]
    listed = np.full((slots, MAX_LISTED), 2**30, np.int32)
    for slot, count in enumerate(num_listed):
        ids = np.sort(rng.choice(vocab, count, replace=False))
        listed[slot, :count] = 2 * ids + rng.integers(0, 2, count)
    biases = rng.choice([0, -np.inf, 5, -5, 100, 0.1], (slots, MAX_LISTED)).astype(np.float32)
    return LogitAdjustments(
        presence_penalty=rng.choice([0, 1.5, -2], slots).astype(np.float32),
        frequency_penalty=rng.choice([0, 0.3, -0.7], slots).astype(np.float32),
        repetition_penalty=rng.choice([1, 1.3, 0.01, 100], slots).astype(np.float32),
        output_counts=counts.view(np.uint32),
        prompt_ids=random_bits(rng, slots, vocab, 0.1),
        allowed_ids=random_bits(rng, slots, vocab, 0.3),
        listed_ids=listed,
        listed_biases=biases,
        num_listed=num_listed.astype(np.int32),
    )


def random_case(
    rng: np.random.Generator, rows: int, vocab: int, limit: int
) -> tuple[np.ndarray, SampleBatch]:
    """Logits [rows, vocab] and a batch. Ids from `limit` on are the largest. The last rows fail:
    one with a logit that is not finite though it may not be sampled, two with nothing allowed."""
    logits = (3 * rng.standard_normal((rows, vocab))).astype(np.float32)
    logits[:, ::3] = np.round(logits[:, ::3])  # ties
    logits[0, :: vocab // 7] = [3.4e38, -3.4e38] * 4 if vocab % 7 else 3.4e38
    logits[:, limit:] = 500.0
    state = random_adjustments(rng, rows, vocab)
    features = rng.integers(0, 16, rows).astype(np.int32)
    features[: min(16, rows)] = np.arange(16)[: min(16, rows)]
    mask_rows = rng.choice([-1, -1, 0, 1], rows).astype(np.int32)
    masks = random_bits(rng, 3, vocab, 0.5)
    masks[2] = 0
    slots = rng.permutation(rows).astype(np.int32)
    order = rng.permutation(rows).astype(np.int32)
    failing = np.arange(rows - NUM_FAILING, rows)
    features[failing] = [ALLOWED_IDS | LISTED_IDS, ALLOWED_IDS, PENALTIES | STOPS_FORBIDDEN]
    mask_rows[failing] = [-1, -1, 2]
    state.allowed_ids[slots[failing[:2]]] = 0
    logits[order[failing[0]], limit // 2] = np.nan
    params = SampleParams(
        temperature=rng.choice([0, 0.6, 1.0, 1.5], rows).astype(np.float32),
        top_p=rng.choice([1.0, 0.95, 0.5], rows).astype(np.float32),
        min_p=rng.choice([0, 0.02], rows).astype(np.float32),
        top_k=rng.choice([0, 1, 20, 1000], rows).astype(np.int32),
        seed=rng.integers(0, 2**64, rows, np.uint64),
        num_logprobs=rng.choice([-1, 0, 20], rows).astype(np.int32),
        adjustments=state,
    )
    positions = rng.permutation(rows).astype(np.int32)
    batch = SampleBatch(order, slots, positions, params, limit, features, mask_rows, masks)
    return logits, batch
