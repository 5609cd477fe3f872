"""The demo model's comparison of a device with NumPy, here with the CPU as the device."""

from __future__ import annotations

import re

import numpy as np
import pytest

from deltaserve.engine.tokenizer import Tokenizer
from tests.test_demo_model import FOLDER
from tools.demo_parity import (
    MAX_LEN,
    NEAR,
    NEAR_DOCUMENTS,
    NOISY_DOCUMENTS,
    NUM_TOKENS,
    compared,
    demo_checks,
    first_choices,
    gaps,
    generate,
)
from tools.demo_recall import is_held_out
from tools.demo_texts import held_out


def test_finds_the_cpu_equal_to_itself_at_every_position() -> None:
    near, noisy, prompts = {"facts": 2, "story": 1}, {"chat": 1}, ["The capital of France is"]
    runs = [{"max_num_seqs": 3, "max_num_batched_tokens": 128, "prefill_chunk": 64}]
    texts = {"prompts": prompts, "near": near, "noisy": noisy, "runs": runs}
    rows = list(demo_checks(FOLDER, "cpu", lambda: None, **texts))
    tokenizer = Tokenizer(str(FOLDER))
    lengths = [
        sum(len(tokenizer.encode(text)) for text in held_out(kind, count))
        for kind, count in (near | noisy).items()
    ]
    assert [row["ok"] for row in rows] == [True] * 5
    assert [row["positions"] for row in rows[:4]] == [*lengths, NUM_TOKENS]
    assert [row["largest_gap"] for row in rows[:4]] == [0] * 4
    assert rows[4]["differing"] == 0


def test_first_choices_are_what_the_tokens_so_far_go_on_with() -> None:
    (ids,), (completion,) = generate(FOLDER, "cpu", (), held_out("facts", 1))
    chosen = first_choices(completion)
    assert len(chosen) == len(ids)
    tokenizer = Tokenizer(str(FOLDER))
    prefixes = [tokenizer.decode(ids[:length]) for length in (5, 20)]
    _, continued = generate(FOLDER, "cpu", prefixes, ())
    assert [c.token_ids[0] for c in continued[:2]] == chosen[[4, 19]].tolist()


@pytest.mark.parametrize("gap", [0.04, 0.06])
@pytest.mark.parametrize("noise_counts", [False, True])
def test_near_is_the_limit_where_rounding_does_not_move_the_candidates(
    gap: float, noise_counts: bool
) -> None:
    logits = np.array([[1.0, 1.0 - gap]], np.float32)
    row = compared(*gaps(np.array([1]), logits, logits), noise_counts=noise_counts)
    assert row["other_argmax"] == 1
    assert row["over_0.05"] == (gap > NEAR)
    assert row["ok"] == (gap <= NEAR)


def test_rounding_excuses_a_gap_only_where_noise_counts() -> None:
    rounded, exact = np.array([[[1.0, 0.9]], [[1.0, 0.95]]], np.float32)
    found = gaps(np.array([1]), rounded, exact)
    assert compared(*found, noise_counts=True)["ok"]
    assert not compared(*found, noise_counts=False)["ok"]


def test_twenty_documents_are_held_to_near() -> None:
    assert sum(NEAR_DOCUMENTS.values()) == 20


@pytest.mark.parametrize("kind", NEAR_DOCUMENTS | NOISY_DOCUMENTS)
def test_documents_fit_the_engine_and_are_the_same_again(kind: str) -> None:
    count = (NEAR_DOCUMENTS | NOISY_DOCUMENTS)[kind]
    texts = held_out(kind, count)
    assert texts == held_out(kind, count)
    assert len(set(texts)) == count
    tokenizer = Tokenizer(str(FOLDER))
    assert max(len(tokenizer.encode(text)) for text in texts) < MAX_LEN


def test_recall_documents_ask_for_keys_that_training_leaves_out() -> None:
    for text in held_out("recall", 6):
        told, answered = re.findall(r"\b\d{4}\b", text)
        assert told == answered
        assert is_held_out(told)
