"""Rows that need the host between the forward pass and sampling: bad_words, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from deltaserve.engine.constraints import BadWords, Constraints
from deltaserve.engine.llm_engine import LLMEngine
from deltaserve.engine.logit_adjustments import id_bits
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.sequence import FinishReason, Sequence, SequenceStatus
from tests.tiny_engine import (
    DelayingDevice,
    assert_idle,
    engine_config,
    run_to_end,
    token_ids,
    write_tiny_model,
)


@pytest.mark.parametrize(
    ("output", "banned"),
    [
        ([], {9}),
        ([1], {2, 9}),
        ([1, 2], {3, 9}),
        ([5, 1, 2], {3, 9}),
        ([1, 2, 3], {9}),
        ([1, 1], {2, 9}),
        ([2], {9}),
    ],
)
def test_the_last_id_of_a_bad_word_is_banned_after_the_others(
    output: list[int], banned: set[int]
) -> None:
    assert set(BadWords([(1, 2), (1, 2, 3), (9,)]).banned(output)) == banned


def test_masks_are_of_the_rows_where_something_is_banned() -> None:
    params = SamplingParams(bad_words=((1, 2), (1, 69)))
    rows = [
        Sequence("a", (0,), params, output_ids=[5, 1], num_sampled=3),
        Sequence("b", (0,), SamplingParams(), output_ids=[1], num_sampled=2),
        Sequence("c", (0,), params, output_ids=[2], num_sampled=2),
        Sequence("d", (0,), params, status=SequenceStatus.FINISHED, output_ids=[1]),
        Sequence("e", (0,), params, output_ids=[1], num_sampled=2),
    ]
    made = Constraints(70).masks(rows)
    assert made.mask_rows.tolist() == [0, -1, -1, -1, 1]
    np.testing.assert_array_equal(made.masks, [~id_bits({2, 69}, 70)] * 2)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def greedy(**options: object) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, **options)  # type: ignore[arg-type]


def generate(directory: Path, *params: SamplingParams, **options: object) -> list[list[int]]:
    """Of the same prompt with each of these, together."""
    engine = LLMEngine(engine_config(directory), **options)  # type: ignore[arg-type]
    for i, own in enumerate(params):
        engine.add_request(str(i), [1, 2, 3], own)
    outputs = run_to_end(engine)
    assert_idle(engine)
    engine.close()
    return [token_ids(outputs[str(i)]) for i in range(len(params))]


def test_bad_words_do_not_come_up_and_others_are_as_without(directory: Path) -> None:
    """Also with a device that runs nothing before it is waited for."""
    [plain] = generate(directory, greedy())
    for device in (None, DelayingDevice()):
        words = (tuple(plain[3:5]), tuple(plain[7:10]))
        bad, beside = generate(directory, greedy(bad_words=words), greedy(), device=device)
        assert beside == plain
        assert bad[:4] == plain[:4]
        assert bad[4] != plain[4]


def test_a_step_waits_for_the_ids_before_it_only_with_bad_words(directory: Path) -> None:
    def order(params: SamplingParams) -> list[str]:
        device = DelayingDevice()
        generate(directory, params, device=device)
        return [what for what, _ in device.events[:6]]

    assert order(greedy()) == ["submit", "submit", "wait", "submit", "wait", "submit"]
    # a step is two submissions; what is waited for is always sampled before
    expected = ["submit", "submit", "submit", "wait", "submit", "submit"]
    assert order(greedy(bad_words=((1, 2),))) == expected
    assert order(greedy(bad_words=((1,),))) == order(greedy())


def test_a_request_that_leaves_no_token_fails_alone(directory: Path) -> None:
    engine = LLMEngine(engine_config(directory))
    params = {"allowed_token_ids": (5,), "bad_words": ((5, 5),)}
    engine.add_request("none", [1, 2, 3], greedy(**params))
    engine.add_request("plain", [1, 2, 3], greedy())
    outputs = run_to_end(engine)
    assert token_ids(outputs["none"]) == [5]
    assert outputs["none"][-1].finish_reason is FinishReason.ERROR
    assert "bad_words" in (outputs["none"][-1].error or "")
    assert len(token_ids(outputs["plain"])) == 12
    assert_idle(engine)
    engine.close()


@pytest.mark.parametrize(
    "params",
    [
        {"logit_bias": ((10**6, 1.0),)},
        {"allowed_token_ids": (1, 10**6)},
        {"bad_words": ((1, 10**6),)},
        {"stop_token_ids": (10**6,)},
    ],
    ids=lambda params: next(iter(params)),
)
def test_ids_the_model_has_not_are_refused_by_name(
    directory: Path, params: dict[str, object]
) -> None:
    engine = LLMEngine(engine_config(directory))
    with pytest.raises(ValueError, match=f"{next(iter(params))}: .* 1000000"):
        engine.add_request("a", [1], greedy(**params))
    assert_idle(engine)
    engine.close()
