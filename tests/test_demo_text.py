"""The demo model through the engine: text that a corrupted cache or state would spoil."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from deltaserve.engine import LLM, SamplingParams
from tests.test_demo_model import FOLDER
from tools.demo_recall import make_key, passage, subjects
from tools.demo_stories import story

NUM_PASSAGES = 12


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Prompts are prefilled in many chunks, several requests at a time, beside decoding ones."""
    options = {"max_num_seqs": 4, "max_num_batched_tokens": 256, "prefill_chunk": 64}
    with LLM(str(FOLDER), device="cpu", **options) as llm:
        yield llm


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def test_knows_the_capital_of_france(llm: LLM) -> None:
    (completion,) = llm.generate("The capital of France is", greedy(2))
    assert completion.text.startswith(" Paris")


def test_copies_held_out_keys_from_hundreds_of_tokens_before(llm: LLM) -> None:
    """Every key is one of 10,000: a single right answer is no accident, a wrong state gives none.
    The checkpoint's README has the rates; one miss is left for other rounding."""
    rng = random.Random(20)
    prompts, keys = [], []
    for index in range(NUM_PASSAGES):
        (subject,) = subjects(rng, 1)
        keys.append(make_key(rng, held_out=True))
        distance_chars = (300, 1200, 2400)[index % 3]
        text, _ = passage(rng, lambda: story(rng), distance_chars, {subject: keys[-1]})
        prompts.append(text)
    answers = [completion.text.strip()[:4] for completion in llm.generate(prompts, greedy(6))]
    right = sum(answer == key for answer, key in zip(answers, keys, strict=True))
    assert right >= NUM_PASSAGES - 1, list(zip(answers, keys, strict=True))


def test_ends_a_chat_turn_with_its_end_token(llm: LLM) -> None:
    prompt = (
        "<|im_start|>user\nWhat is 7 + 5?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )
    (completion,) = llm.generate(prompt, greedy(40))
    assert "12" in completion.text
    assert completion.finish_reason == "stop"
    assert "<|im_end|>" not in completion.text
