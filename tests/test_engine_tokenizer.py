"""Tokenizer and IncrementalDecoder: ids, bytes, end ids, text that is UTF-8 safe at every cut."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.engine.incremental_decode import IncrementalDecoder
from deltaserve.engine.tokenizer import Tokenizer
from tests.tiny_checkpoint import (
    ENDOFTEXT_ID,
    IM_END_ID,
    IM_START_ID,
    NUM_TOKENS,
    write_tokenizer,
)

EMOJI = "👩‍👩‍👧‍👦 naïve 東京 🏳️‍🌈\u0301"


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer(directory)


def deltas(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = IncrementalDecoder(tokenizer)
    return [*(decoder.push(id_) for id_ in ids), decoder.finish()]


def test_ids_and_limits(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_limit == NUM_TOKENS
    assert tokenizer.end_ids == {ENDOFTEXT_ID, IM_END_ID}
    assert tokenizer.special_ids == {ENDOFTEXT_ID, IM_START_ID, IM_END_ID}


def test_special_tokens_in_the_text_become_ids(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a<|im_end|>")
    assert ids == [ord("a"), IM_END_ID]
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<|im_end|>"


def test_lone_surrogate_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="not valid Unicode"):
        tokenizer.encode("a\ud800")


def test_token_text_shows_bytes_of_part_characters(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_text(tokenizer.encode(" the")[0]) == " the"
    assert tokenizer.token_text(0xE2) == "bytes:\\xe2"
    assert tokenizer.token_text(IM_END_ID) == "<|im_end|>"
    assert tokenizer.token_bytes(NUM_TOKENS) == b""


@given(text=st.text())
def test_text_survives_a_round_trip(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text


@given(ids=st.lists(st.integers(0, NUM_TOKENS - 1), max_size=40))
def test_deltas_join_to_the_decode_of_all(tokenizer: Tokenizer, ids: list[int]) -> None:
    pieces = deltas(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids)
    data = b"".join(tokenizer.token_bytes(i) for i in ids if i not in tokenizer.special_ids)
    assert "".join(pieces) == data.decode(errors="replace")


@pytest.mark.parametrize("cut", range(len(EMOJI.encode()) + 1))
def test_character_in_parts_comes_out_whole(tokenizer: Tokenizer, cut: int) -> None:
    """One token a byte: after `cut` of them exactly the whole characters are out."""
    data = EMOJI.encode()
    decoder = IncrementalDecoder(tokenizer)
    before = "".join(decoder.push(byte) for byte in data[:cut])
    assert before == data[:cut].decode(errors="ignore")
    assert before + "".join(decoder.push(byte) for byte in data[cut:]) == EMOJI


def test_invalid_bytes_become_replacement_characters_when_sure(tokenizer: Tokenizer) -> None:
    assert deltas(tokenizer, [0xE2, 0x98, ord("x"), 0xC3]) == ["", "", "\ufffdx", "", "\ufffd"]


def test_special_token_inside_a_character_does_not_break_it(tokenizer: Tokenizer) -> None:
    assert "".join(deltas(tokenizer, [0xC3, IM_START_ID, 0xA9])) == "é"


def test_nothing_of_a_prompt_that_ends_inside_a_character_appears(tokenizer: Tokenizer) -> None:
    """The prompt held the first two bytes of "☃", the output starts with the third."""
    assert deltas(tokenizer, [0x83, ord("!")]) == ["\ufffd", "!", ""]


def test_decode_agrees_with_the_library(directory: Path, tokenizer: Tokenizer) -> None:
    from tokenizers import Tokenizer as Library

    library = Library.from_file(str(directory / "tokenizer.json"))
    text = "the rain in " + EMOJI + "<|im_end|>"
    ids = library.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode(text) == ids
    assert tokenizer.decode(ids) == library.decode(ids)
    assert tokenizer.decode(ids[:-8]) == library.decode(ids[:-8])


def test_tokens_that_only_the_config_lists_are_added(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    listed = {str(NUM_TOKENS): {"content": "<tts>", "special": True, "normalized": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.vocab_limit == NUM_TOKENS + 1
    assert tokenizer.encode("<tts>") == [NUM_TOKENS]
    assert tokenizer.decode([NUM_TOKENS]) == ""


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json: no such file"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": {"type": "BPE"}}'])
def test_corrupt_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a readable"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "listed", ['{"x": {}}', '{"9999": {}}', '{"9999": "a"}', "[]", "5"], ids=str
)
def test_corrupt_tokenizer_config_is_named(tmp_path: Path, listed: str) -> None:
    write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(f'{{"added_tokens_decoder": {listed}}}')
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: not a readable"):
        Tokenizer(tmp_path)


def test_added_token_under_an_impossible_id_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    listed = {str(NUM_TOKENS + 5): {"content": "<tts>", "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    with pytest.raises(ValueError, match="'<tts>' has id 276 there, but would get 271"):
        Tokenizer(tmp_path)


def test_other_kinds_of_tokenizer_are_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer as Library
    from tokenizers import models

    Library(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="needs a byte-level BPE tokenizer, found WordLevel"):
        Tokenizer(tmp_path)


def test_tags_of_reasoning_and_calls_are_text_also_where_they_are_special(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    markup = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    added = [
        {"id": NUM_TOKENS + n, "content": content, "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for n, content in enumerate([*markup, "<|other|>"])
    ]
    path = tmp_path / "tokenizer.json"
    written = json.loads(path.read_text())
    written["added_tokens"] += added
    path.write_text(json.dumps(written))
    tokenizer = Tokenizer(tmp_path)
    ids = tokenizer.encode("a</think><tool_call><|other|>b")
    assert len(ids) == 5
    assert tokenizer.decode(ids) == "a</think><tool_call>b"
