"""OutputProcessor: text, stop strings at every cut, finish reasons, usage, log-probabilities."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.engine.output_processor import OutputProcessor, StopChecker, TextOutput
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.sequence import FinishReason, RequestOutput, TokenLogprobs
from deltaserve.engine.tokenizer import Tokenizer
from tests.tiny_checkpoint import IM_END_ID, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return Tokenizer(path)


def processor(tokenizer: Tokenizer, **params: object) -> OutputProcessor:
    return OutputProcessor(tokenizer, SamplingParams(**params), num_prompt_tokens=3)  # type: ignore[arg-type]


def step(
    *ids: int, finish: FinishReason | None = None, stop_id: int | None = None
) -> RequestOutput:
    return RequestOutput("r", ids, finish_reason=finish, stop_id=stop_id)


def feed(
    processor: OutputProcessor, data: bytes, finish: FinishReason | None = FinishReason.LENGTH
) -> list[TextOutput]:
    """One byte, that is one token, a step."""
    last = len(data) - 1
    return [
        processor.process(step(byte, finish=finish if i == last else None))
        for i, byte in enumerate(data)
    ]


def text_of(outputs: list[TextOutput]) -> str:
    return "".join(output.text for output in outputs)


def test_text_usage_and_length(tokenizer: Tokenizer) -> None:
    p = processor(tokenizer)
    outputs = feed(p, "héllo".encode())
    assert [o.text for o in outputs] == ["h", "", "é", "l", "l", "o"]
    assert outputs[-1].finish_reason is FinishReason.LENGTH
    assert outputs[-1].stop_reason is None
    assert (p.num_prompt_tokens, p.num_output_tokens) == (3, 6)


def test_end_id_counts_and_is_no_text(tokenizer: Tokenizer) -> None:
    p = processor(tokenizer)
    output = p.process(step(ord("a"), IM_END_ID, finish=FinishReason.STOP, stop_id=IM_END_ID))
    assert output.text == "a"
    assert output.token_ids == (ord("a"), IM_END_ID)
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, IM_END_ID)
    assert not output.must_abort
    assert p.num_output_tokens == 2


def test_end_id_that_is_an_ordinary_token_is_no_text(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer).process(step(65, finish=FinishReason.STOP, stop_id=65))
    assert output.text == ""


def test_half_a_character_at_the_end_is_replaced(tokenizer: Tokenizer) -> None:
    assert text_of(feed(processor(tokenizer), "a☃".encode()[:-1])) == "a\ufffd"


def test_error_and_abort_release_what_was_held(tokenizer: Tokenizer) -> None:
    p = processor(tokenizer, stop=("abc",))
    assert p.process(step(ord("a"), ord("b"))).text == ""
    last = p.process(RequestOutput("r", (), (), FinishReason.ERROR, error="not finite"))
    assert (last.text, last.finish_reason, last.error) == ("ab", FinishReason.ERROR, "not finite")


@pytest.mark.parametrize("cut", range(1, 11))
def test_stop_string_over_two_steps(tokenizer: Tokenizer, cut: int) -> None:
    data = b"one STOP two"
    p = processor(tokenizer, stop=("STOP",))
    first, second = p.process(step(*data[:cut])), p.process(step(*data[cut:]))
    assert first.text + second.text == "one "
    ended = first if cut >= 8 else second
    assert (ended.finish_reason, ended.stop_reason) == (FinishReason.STOP, "STOP")
    assert ended.must_abort
    assert p.num_output_tokens == 8
    assert len(first.token_ids) + len(second.token_ids) == 8


def test_outputs_after_a_stop_string_add_nothing(tokenizer: Tokenizer) -> None:
    p = processor(tokenizer, stop=("b",))
    p.process(step(ord("a"), ord("b")))
    late = p.process(step(ord("c"), finish=FinishReason.LENGTH))
    assert (late.text, late.token_ids, late.must_abort) == ("", (), False)
    assert p.num_output_tokens == 2


def test_stop_string_in_the_last_output_needs_no_abort(tokenizer: Tokenizer) -> None:
    output = processor(tokenizer, stop=("b",)).process(step(ord("b"), finish=FinishReason.LENGTH))
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, "b")
    assert not output.must_abort


def test_stop_string_of_a_multi_byte_character(tokenizer: Tokenizer) -> None:
    outputs = feed(processor(tokenizer, stop=("☃",)), "a☃b".encode(), finish=None)
    assert text_of(outputs) == "a"
    assert outputs[3].stop_reason == "☃"


def test_stop_string_found_when_the_end_settles_the_bytes(tokenizer: Tokenizer) -> None:
    outputs = feed(processor(tokenizer, stop=("a\ufffd",)), b"xa\xe2")
    assert text_of(outputs) == "x"
    assert outputs[-1].stop_reason == "a\ufffd"


def test_special_tokens_do_not_part_a_stop_string(tokenizer: Tokenizer) -> None:
    p = processor(tokenizer, stop=("ab",))
    assert p.process(step(ord("a"), IM_END_ID, ord("b"))).stop_reason == "ab"


def stopped_by_characters(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The definition: read character by character, end with the first stop that is complete."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    st.text("abc", max_size=24),
    st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=4),
    st.lists(st.integers(1, 5)),
)
def test_stop_strings_do_not_depend_on_the_cuts(
    text: str, stops: list[str], lengths: list[int]
) -> None:
    checker = StopChecker(stops)
    released, found, rest = "", None, text
    while rest and found is None:
        length = lengths.pop() if lengths else 1
        piece, found = checker.push(rest[:length])
        released, rest = released + piece, rest[length:]
        whole, _ = stopped_by_characters(text, stops)
        assert whole.startswith(released)  # nothing of a stop string was let through
    if found is None:
        released += checker.finish()
    assert (released, found) == stopped_by_characters(text, stops)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    checker = StopChecker(["abcd", "xy"])
    assert checker.push("zab") == ("z", None)
    assert checker.push("x") == ("ab", None)
    assert checker.push("z") == ("xz", None)


def test_logprobs_have_text_and_offsets(tokenizer: Tokenizer) -> None:
    p = processor(tokenizer, logprobs=2)
    the = tokenizer.encode(" the")[0]
    logprobs = (
        TokenLogprobs(-0.5, (the, 65), (-0.5, -1.5)),
        TokenLogprobs(-1.0, (0xC3,), (-1.0,)),
        TokenLogprobs(-2.0, (), ()),
        TokenLogprobs(-3.0, (IM_END_ID, 66), (-3.0, -4.0)),
    )
    output = p.process(
        RequestOutput(
            "r", (the, 0xC3, 0xA9, IM_END_ID), logprobs, FinishReason.STOP, stop_id=IM_END_ID
        )
    )
    assert output.text == " theé"
    assert [entry.token for entry in output.logprobs] == [
        " the",
        "bytes:\\xc3",
        "bytes:\\xa9",
        "<|im_end|>",
    ]
    assert [entry.text_offset for entry in output.logprobs] == [0, 4, 4, 5]
    assert [entry.logprob for entry in output.logprobs] == [-0.5, -1.0, -2.0, -3.0]
    assert output.logprobs[0].top == ((" the", -0.5), ("A", -1.5))
    assert output.logprobs[2].top == ()


def test_logprobs_end_with_the_token_that_completes_a_stop_string(tokenizer: Tokenizer) -> None:
    p = processor(tokenizer, stop=("b",), logprobs=0)
    entry = TokenLogprobs(-1.0, (), ())
    output = p.process(RequestOutput("r", (97, 98, 99), (entry, entry, entry)))
    assert [e.token for e in output.logprobs] == ["a", "b"]
    assert output.token_ids == (97, 98)
