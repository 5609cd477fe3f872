"""What a request's text must be for any tokens, any cut into steps and any stop strings.

The definition is by the whole: decode all tokens so far, look for stop strings in that. The product
never has the whole at hand, so the two share nothing.
"""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import event, example, given, settings
from hypothesis import strategies as st

from deltaserve.engine.output_processor import OutputProcessor, TextOutput
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.sequence import FinishReason, RequestOutput, TokenLogprobs
from deltaserve.engine.tokenizer import Tokenizer
from deltaserve.server.echo import PromptEcho

from .tiny_checkpoint import IM_END_ID, NUM_TOKENS, write_tokenizer

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"  # three emoji joined by ZWJ: 18 bytes
CHARACTERS = ["a", "b", " the", "\u00e9", "e\u0301", "\u2603", "\U0001f44d\U0001f3fd", FAMILY]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return Tokenizer(path)


def _byte_tokens(text: str) -> list[int]:
    return list(text.encode())


ids_of_text = st.sampled_from(CHARACTERS).map(_byte_tokens)  # split at every byte
ids_of_noise = st.lists(st.integers(0, NUM_TOKENS - 1), max_size=3)  # merges, specials, bad bytes
token_ids = (
    st.lists(ids_of_text | ids_of_noise, max_size=8)
    .map(lambda parts: [id_ for part in parts for id_ in part])
    .filter(bool)
)
stop_strings = st.lists(
    st.text("ab \u00e9\u2603\u200d\U0001f469\ufffdthe", min_size=1, max_size=4)
    | st.tuples(st.sampled_from(CHARACTERS), st.sampled_from(CHARACTERS)).map("".join),
    min_size=1,
    max_size=4,
)


@dataclass(frozen=True)
class Whole:
    text: str
    num_tokens: int
    stop: str | None


def whole(tokenizer: Tokenizer, ids: list[int], params: SamplingParams) -> Whole:
    """The definition."""
    skip = tokenizer.special_ids if params.skip_special_tokens else frozenset()
    data, before = b"", ""
    for number, id_ in enumerate(ids, 1):
        data += b"" if id_ in skip else tokenizer.token_bytes(id_)
        text = codecs.utf_8_decode(data, "replace", False)[0]
        if number == len(ids):
            text = data.decode(errors="replace")  # nothing can complete the rest any more
        for end in range(len(before) + 1, len(text) + 1):
            complete = [stop for stop in params.stop if text[:end].endswith(stop)]
            if complete and number > params.min_tokens:
                stop = max(complete, key=len)
                kept = end if params.include_stop_str_in_output else end - len(stop)
                return Whole(text[:kept], number, stop)
        before = text
    return Whole(before, len(ids), None)


def in_steps(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int], params: SamplingParams
) -> list[TextOutput]:
    """Outputs up to the end, `sizes` tokens a step and one each after those."""
    processor = OutputProcessor(tokenizer, params, num_prompt_tokens=1)
    outputs: list[TextOutput] = []
    sizes, rest = list(sizes), list(ids)
    while rest and processor.finish_reason is None:
        size = sizes.pop() if sizes else 1
        step, rest = tuple(rest[:size]), rest[size:]
        finish = None if rest else FinishReason.LENGTH
        logprobs = tuple(TokenLogprobs(-1.0, (), ()) for _ in step)
        outputs.append(processor.process(RequestOutput("r", step, logprobs, finish)))
    assert processor.num_output_tokens == sum(len(output.token_ids) for output in outputs)
    return outputs


@example([*b"ab"], [], ["ab", "b"], True, False, 0)
@example([*"\u2603".encode(), IM_END_ID, 97], [2, 2], ["\u2603<|im_end|>"], False, True, 0)
@example([*b"abab"], [4], ["ab"], True, False, 2)
@settings(max_examples=400)
@given(
    token_ids,
    st.lists(st.integers(1, 6), max_size=8),
    stop_strings,
    st.booleans(),
    st.booleans(),
    st.integers(0, 6),
)
def test_text_does_not_depend_on_steps_and_no_stop_string_leaks(
    tokenizer: Tokenizer,
    ids: list[int],
    sizes: list[int],
    stops: list[str],
    skip_special_tokens: bool,
    include: bool,
    min_tokens: int,
) -> None:
    params = SamplingParams(
        max_tokens=1000,
        min_tokens=min_tokens,
        stop=tuple(stops),
        skip_special_tokens=skip_special_tokens,
        include_stop_str_in_output=include,
        logprobs=0,
    )
    expected = whole(tokenizer, ids, params)
    event("stopped" if expected.stop else "not stopped")
    outputs = in_steps(tokenizer, ids, sizes, params)
    released = ""
    for output in outputs:
        released += output.text
        assert expected.text.startswith(released)  # nothing that had to be taken back
    assert released == expected.text
    last = outputs[-1]
    assert last.stop_reason == expected.stop
    assert last.finish_reason is (FinishReason.STOP if expected.stop else FinishReason.LENGTH)
    used = [id_ for output in outputs for id_ in output.token_ids]
    assert used == ids[: expected.num_tokens]
    assert len([entry for output in outputs for entry in output.logprobs]) == len(used)


@given(token_ids, st.lists(st.integers(1, 6), max_size=8))
def test_without_stop_strings_nothing_is_held_but_bytes(
    tokenizer: Tokenizer, ids: list[int], sizes: list[int]
) -> None:
    """At each step the text is that of all whole characters so far."""
    params = SamplingParams(skip_special_tokens=False, max_tokens=1000)
    released, num_tokens = "", 0
    for output in in_steps(tokenizer, ids, sizes, params):
        released += output.text
        num_tokens += len(output.token_ids)
        data = b"".join(tokenizer.token_bytes(id_) for id_ in ids[:num_tokens])
        final = num_tokens == len(ids)
        assert released == codecs.utf_8_decode(data, "replace", final)[0]
    assert released == tokenizer.decode(ids, skip_special_tokens=False)


@given(st.text(CHARACTERS[3] + "a\u2603" + FAMILY, min_size=1, max_size=6), st.data())
def test_nothing_of_a_prompt_that_ends_inside_a_character(
    tokenizer: Tokenizer, text: str, data: st.DataObject
) -> None:
    """The output is the text of its own bytes, whatever the prompt's last ones would make of them;
    and an echoed prompt has none of the output's."""
    encoded = text.encode()
    cut = data.draw(st.integers(0, len(encoded)))
    prompt, output = list(encoded[:cut]), list(encoded[cut:])
    outputs = in_steps(tokenizer, output, [], SamplingParams(max_tokens=1000))
    assert "".join(o.text for o in outputs) == bytes(output).decode(errors="replace")
    assert PromptEcho(tokenizer, prompt).text == bytes(prompt).decode(errors="replace")


@given(token_ids)
def test_offsets_of_an_echoed_prompt_point_at_each_tokens_first_character(
    tokenizer: Tokenizer, ids: list[int]
) -> None:
    echo = PromptEcho(tokenizer, ids)
    entries: list[Any] = [TokenLogprobs(-1.0, (), ())] * (len(ids) - 1)
    shown = echo.logprobs(entries, 0)
    assert echo.text == tokenizer.decode(ids, skip_special_tokens=False)
    for number, offset in enumerate(shown.text_offset):
        before = b"".join(tokenizer.token_bytes(id_) for id_ in ids[:number])
        assert echo.text[:offset] == codecs.utf_8_decode(before, "replace", False)[0]
    assert len(shown.tokens) == len(shown.token_logprobs) == len(shown.top_logprobs) == len(ids)
