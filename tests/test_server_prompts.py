"""Prompts from JSON of any form and size, and token ids from texts, without sockets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.engine.tokenizer import PIECE_CHARS, Tokenizer
from deltaserve.server.errors import ApiError
from deltaserve.server.prompts import (
    SHORT_BYTES,
    SHORT_CHARS,
    Prompt,
    PromptLimits,
    encode,
    read_prompts,
)

from .tiny_checkpoint import write_tokenizer

LIMITS = PromptLimits(max_tokens=30_000, max_chars=500_000, vocab_limit=300)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return Tokenizer(path)


def read(value: Any, **dump: Any) -> list[Prompt]:
    raw = value if isinstance(value, bytes) else json.dumps(value, **dump).encode()
    return asyncio.run(read_prompts(msgspec.Raw(raw), LIMITS))


def refusal(value: Any, limits: PromptLimits = LIMITS) -> str:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    with pytest.raises(ApiError) as caught:
        asyncio.run(read_prompts(msgspec.Raw(raw), limits))
    assert (caught.value.status, caught.value.param) == (400, "prompt")
    return caught.value.message


FORMS = [
    ("string", "a", ["a"]),
    ("strings", ["a", "b"], ["a", "b"]),
    ("ids", [1, 2], [[1, 2]]),
    ("lists", [[1], [2, 3]], [[1], [2, 3]]),
]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize(("value", "prompts"), [f[1:] for f in FORMS], ids=[f[0] for f in FORMS])
def test_forms_of_prompts(value: Any, prompts: list[Prompt], indent: int | None) -> None:
    assert read(value, indent=indent) == prompts


@given(
    st.lists(st.text(min_size=1), min_size=1, max_size=8)
    | st.lists(st.lists(st.integers(0, 299), min_size=1), min_size=1, max_size=8),
    st.booleans(),
    st.sampled_from([None, 0, 3]),
)
def test_lists_are_read_as_json_reads_them(
    prompts: list[Any], ascii_only: bool, indent: int | None
) -> None:
    assert read(prompts, ensure_ascii=ascii_only, indent=indent) == prompts


def test_long_prompts_are_read_the_same() -> None:
    text = 'quo"ted \\ [1, 2] \u2603' * SHORT_BYTES
    assert read(text) == [text]
    assert read([text, "a"]) == [text, "a"]
    ids = [7] * SHORT_BYTES
    assert read([ids, [1]]) == [ids, [1]]


MALFORMED = [
    ("", "must not be empty"),
    ([], "must not be empty"),
    (b"[ ]", "must not be empty"),
    ([""], "must not be empty"),
    ([[]], "must not be empty"),
    ([[1], []], "must not be empty"),
    (5, "must be a string or a list"),
    ({}, "must be a string or a list"),
    ([1, "a"], "token ids must be integers"),
    ([1.0], "token ids must be integers"),
    ([True], "token ids must be integers"),
    ([1, [2]], "token ids must be integers"),
    (["a", 1], "must be a string, a list of strings"),
    (["a", [1]], "must be a string, a list of strings"),
    ([[1], "a"], "must be a string, a list of strings"),
    ([[1, "a"]], "token ids must be integers"),
    ([[1, "]"]], "token ids must be integers"),
    ([[[1]]], "token ids must be integers"),
    ([[[]], [1]], "token ids must be integers"),
    ([300], "token id 300 is not in 0 .. 299"),
    ([[5], [-1]], "token id -1 is not in 0 .. 299"),
    ([10**600], "token id of more than 128 bits is not in"),
    (["a"] * 1025, "at most 1024 prompts"),
    (b'["\xff"]', "not valid JSON"),
    (b'["\\ud83d"]', "lone surrogate"),
]


@pytest.mark.parametrize(("value", "message"), MALFORMED, ids=range(len(MALFORMED)))
def test_what_is_no_prompt_is_refused(value: Any, message: str) -> None:
    assert message in refusal(value)


def test_too_many_ids_are_counted_and_not_built() -> None:
    raw = b"[" + b"1," * 40_000 + b'"no id"]'
    assert "has 40001 tokens, more than the context length of 30000" in refusal(raw)
    assert "has 40001 tokens" in refusal(b"[[1]," + raw + b"]")
    assert len(read(b"[" + b"1," * 29_999 + b"1]")[0]) == 30_000


TEXTS = ["word and word " * 9000, "no_space" * 12_000, "\u2603 e\u0301 " * 20_000, "a b" * 20_000]


@pytest.mark.parametrize("text", TEXTS, ids=["words", "one word", "not ascii", "letters"])
def test_a_text_in_pieces_has_the_ids_of_the_whole(tokenizer: Tokenizer, text: str) -> None:
    limits = PromptLimits(max_tokens=1 << 20, max_chars=1 << 20, vocab_limit=300)
    assert len(text) > SHORT_CHARS
    assert asyncio.run(encode(tokenizer, text, limits)) == tokenizer.encode(text)


@pytest.mark.parametrize(
    "text",
    [
        "word and word ",
        "if x:\n\t(y,\n\tz)\n",
        "\u65e5\u672c\uff0c\u8a9e\u3002",
        "na\u00efvet\u00e9 ",
    ],
    ids=["words", "code", "chinese", "accents"],
)
def test_a_long_text_of_words_is_cut(tokenizer: Tokenizer, text: str) -> None:
    text *= 10 * PIECE_CHARS // len(text)
    end = 0
    while end < len(text):
        start, (_, end) = end, tokenizer.encode_piece(text, end)
        assert end - start < 1.01 * PIECE_CHARS


@given(
    st.text("ab \n.,\uff0c\u65e5\u00e9\u0301\u20dd'st<|im_end|>", min_size=3, max_size=60),
    st.integers(1, 9),
)
def test_pieces_of_any_size_join(tokenizer: Tokenizer, text: str, size: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("deltaserve.engine.tokenizer.PIECE_CHARS", size + 2)
        ids: list[int] = []
        end = 0
        while end < len(text):
            piece, end = tokenizer.encode_piece(text, end)
            ids += piece
    assert ids == tokenizer.encode(text)


def test_a_long_text_is_left_when_it_cannot_fit(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_to: list[int] = []

    def encode_piece(text: str, start: int) -> tuple[list[int], int]:
        ids, end = Tokenizer.encode_piece(tokenizer, text, start)
        read_to.append(end)
        return ids, end

    monkeypatch.setattr(tokenizer, "encode_piece", encode_piece)
    text = "lorem ipsum " * 20_000
    with pytest.raises(ApiError, match="more than the context length of 30000 tokens") as caught:
        asyncio.run(encode(tokenizer, text, LIMITS))
    assert f"characters are {len(tokenizer.encode(text[: read_to[-1]]))} tokens" in str(
        caught.value
    )
    assert read_to[-1] < len(text) / 2
    with pytest.raises(ApiError, match="has 600000 characters"):
        asyncio.run(encode(tokenizer, "a" * 600_000, LIMITS))
