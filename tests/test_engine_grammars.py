"""Grammars by themselves: what each kind allows, which limits hold, what is kept and forgotten."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from deltaserve.engine import grammars as grammars_module
from deltaserve.engine.constraints import ALL
from deltaserve.engine.forward_batch import mask_words
from deltaserve.engine.grammar import MAX_CHOICES, MAX_GRAMMAR_CHARS, Grammar, GrammarError
from deltaserve.engine.grammar_checker import GrammarChecker
from deltaserve.engine.grammar_state import GrammarState, MaskFiller
from deltaserve.engine.grammar_vocabulary import GrammarVocabulary
from deltaserve.engine.grammars import Grammars
from deltaserve.engine.request_queue import QueueFullError
from deltaserve.engine.tokenizer import Tokenizer
from tests.tiny_checkpoint import ENDOFTEXT_ID, IM_END_ID, IM_START_ID, NUM_TOKENS, write_tokenizer

VOCAB = NUM_TOKENS + 21
ENDS = frozenset({ENDOFTEXT_ID, IM_END_ID})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(directory)
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Iterator[Grammars]:
    made = Grammars(tokenizer, ENDS, VOCAB)
    yield made
    made.close()


def state_of(grammars: Grammars, grammar: Grammar) -> GrammarState:
    return GrammarState(grammars.compile(grammar).result(60), grammar.start_after)


def allowed_after(state: GrammarState, output_ids: list[int]) -> set[int]:
    state.advance(output_ids)
    masks = np.full((1, mask_words(VOCAB)), ALL)
    MaskFiller(1).fill([(state, 0)], masks)
    bits = np.unpackbits(masks.view(np.uint8)[0], bitorder="little")
    return {int(id_) for id_ in np.flatnonzero(bits)}


def accepts(grammars: Grammars, grammar: Grammar, text: str) -> bool:
    """Byte by byte, then an end id."""
    ids = [*text.encode(), IM_END_ID]
    state = state_of(grammars, grammar)
    return all(id_ in allowed_after(state, ids[:n]) for n, id_ in enumerate(ids))


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
GBNF = 'root ::= "yes" | "no" [a-c]+'
CASES = [
    ("json_schema", json.dumps(SCHEMA), ['{"a": 1}', '{\n  "a":1\n}'], ['{"a": "x"}', "{}", "["]),
    ("json_schema", '{"const": "<|im_end|>"}', ['"<|im_end|>"'], ['"<|im_'])  ,
    ("regex", "[a-c]{2}(x|y+)", ["abx", "ccyyy"], ["ab", "abxy", "a\u00e9x"]),
    ("regex", "\u00e9{2}\\d", ["\u00e9\u00e92"], ["\u00e9"]),
    ("choice", '["a", "ab", "b\\n\\"\\u96ea"]', ["a", "ab", 'b\n"\u96ea'], ["b", "abb"]),
    ("lark", 'start: "x" y\ny: /[0-9]+/', ["x12"], ["x", "12"]),
    ("grammar", 'start: "x" y\ny: /[0-9]+/', ["x12"], ["x"]),
    ("grammar", GBNF, ["yes", "noabc"], ["no", "yesa"]),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "text", "good", "bad"), CASES, ids=[c[0] for c in CASES])
def test_what_follows_a_grammar_is_allowed_and_nothing_else(
    grammars: Grammars, kind: str, text: str, good: list[str], bad: list[str]
) -> None:
    grammar = Grammar(kind, text)
    assert [accepts(grammars, grammar, text) for text in good] == [True] * len(good)
    assert [accepts(grammars, grammar, text) for text in bad] == [False] * len(bad)


def test_as_many_choices_as_there_may_be(grammars: Grammars) -> None:
    choices = [f"choice {n}" for n in range(MAX_CHOICES)]
    grammar = Grammar("choice", json.dumps(choices))
    assert accepts(grammars, grammar, choices[-1])
    assert not accepts(grammars, grammar, "choice x")


def test_end_ids_are_allowed_exactly_where_the_grammar_may_end(grammars: Grammars) -> None:
    state = state_of(grammars, Grammar("regex", "ab?"))
    assert allowed_after(state, []) == {ord("a")}
    assert allowed_after(state, [*b"a"]) == {ord("b"), *ENDS}
    assert allowed_after(state, [*b"ab"]) == ENDS


def test_special_tokens_and_ids_without_a_token_are_no_text(grammars: Grammars) -> None:
    anything = allowed_after(state_of(grammars, Grammar("regex", "(?s:.*)")), [])
    assert anything >= ENDS
    assert IM_START_ID not in anything
    assert max(anything) < NUM_TOKENS
    special = state_of(grammars, Grammar("lark", "start: <|im_start|>"))
    assert allowed_after(special, []) == {IM_START_ID}


def test_blanks_between_json_tokens_are_bounded(grammars: Grammars) -> None:
    state = state_of(grammars, Grammar("json_schema", json.dumps(SCHEMA)))
    assert allowed_after(state, [*b"{ "]) == {ord('"')}
    assert ord(" ") in allowed_after(state_of(grammars, Grammar("json_schema", "{}")), [*b"{\n  "])
    compact = {"x-guidance": {"whitespace_flexible": False, "whitespace_pattern": None}, **SCHEMA}
    state = state_of(grammars, Grammar("json_schema", json.dumps(compact)))
    assert allowed_after(state, [*b"{"]) == {ord('"')}


def test_it_holds_after_the_ids_it_starts_after(grammars: Grammars, tokenizer: Tokenizer) -> None:
    grammar = Grammar("regex", "[ab]", start_after=(5, 6))
    state = state_of(grammars, grammar)
    free = set(range(mask_words(VOCAB) * 32)) - ENDS
    assert allowed_after(state, []) == free
    assert allowed_after(state, [6, 5]) == free
    assert allowed_after(state, [6, 5, 5]) == free
    newline = ord("\n")
    assert allowed_after(state, [6, 5, 5, 6]) == {ord("a"), ord("b"), newline}
    assert allowed_after(state, [6, 5, 5, 6, newline]) == {ord("a"), ord("b")}
    assert allowed_after(state, [6, 5, 5, 6, newline, ord("b")]) == ENDS


def test_a_newline_is_the_grammars_where_that_wants_one(grammars: Grammars) -> None:
    state = state_of(grammars, Grammar("regex", "\na", start_after=(5,)))
    assert allowed_after(state, [5]) == {ord("\n")}
    assert allowed_after(state, [5, ord("\n")]) == {ord("a")}


def test_masks_of_many_rows_are_those_of_each(grammars: Grammars) -> None:
    texts = ["[a-c]x", "y{3}", "(?s:.*)", "\u00e9", "[0-9]+"]
    states = [state_of(grammars, Grammar("regex", text)) for text in texts]
    masks = np.full((7, mask_words(VOCAB)), ALL)
    MaskFiller(2).fill([(state, row + 1) for row, state in enumerate(states)], masks)
    assert (masks[[0, 6]] == ALL).all()
    for row, text in enumerate(texts):
        alone = np.full((1, mask_words(VOCAB)), ALL)
        MaskFiller(1).fill([(state_of(grammars, Grammar("regex", text)), 0)], alone)
        np.testing.assert_array_equal(masks[row + 1], alone[0])


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + "{}" + "}" * depth


REFUSED = {
    "not JSON": ("json_schema", "{", "EOF"),
    "unsatisfiable": ("json_schema", '{"$ref": "#"}', "no output follows it"),
    "unsupported": ("json_schema", '{"uniqueItems": true}', "uniqueItems"),
    "remote reference": ("json_schema", '{"$ref": "http://example.com/x"}', "example.com"),
    "file reference": ("json_schema", '{"$ref": "file:///etc/passwd"}', "does not fetch"),
    "deep": ("json_schema", nested(5000), "recursion limit"),
    "exploding": (
        "json_schema",
        json.dumps(
            {
                "allOf": [
                    {"anyOf": [{"properties": {f"p{i}_{j}": {}}} for j in range(4)]}
                    for i in range(12)
                ]
            }
        ),
        "too large",
    ),
    "look-ahead": ("regex", "(?=a)b", "look-around"),
    "deep groups": ("regex", "(" * 20000 + "a" + ")" * 20000, "nested parentheses"),
    "no choices": ("choice", "[]", "choices"),
    "empty choice": ("choice", '["a", ""]', "choices"),
    "no rule": ("lark", "start: missing", "missing"),
    "unknown token": ("lark", "start: <|nope|>", "nope"),
    "deep GBNF": ("grammar", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "recursion"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_compiled_says_why(grammars: Grammars, name: str) -> None:
    kind, text, reason = REFUSED[name]
    with pytest.raises(GrammarError, match=f"(?s)^guided: .*{reason}") as caught:
        grammars.compile(Grammar(kind, text, field="guided")).result(60)
    assert len(str(caught.value)) < 600


def test_a_process_that_died_is_started_again(tokenizer: Tokenizer) -> None:
    checker = GrammarChecker(GrammarVocabulary(tokenizer, ENDS, VOCAB))
    first, _ = checker.check(Grammar("regex", "a"))
    assert checker._process is not None
    checker._process.kill()
    checker._process.wait()
    assert checker.check(Grammar("regex", "a"))[0] == first
    checker.close()


@pytest.mark.parametrize(
    ("kind", "text", "start_after"),
    [
        ("xml", "a", ()),
        ("regex", "", ()),
        ("regex", "a" * (MAX_GRAMMAR_CHARS + 1), ()),
        ("regex", "a", (1,) * 17),
    ],
)
def test_limits_of_the_message(kind: str, text: str, start_after: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^grammar: "):
        Grammar(kind, text, start_after)


def test_equal_grammars_are_compiled_once_and_the_oldest_are_forgotten(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammars_module, "MAX_COMPILED", 2)
    made = [grammars.compile(Grammar("regex", text, field=text)) for text in "pqp"]
    assert made[0] is made[2]
    for future in made:
        future.result(60)
    grammars.compile(Grammar("regex", "r")).result(60)
    assert grammars.compile(Grammar("regex", "p")) is made[0]
    grammars.compile(Grammar("regex", "s")).result(60)
    assert grammars.compile(Grammar("regex", "q")) is not made[1]


def test_so_many_wait_to_be_compiled_and_no_more(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cancelled one makes room, and may be asked for again."""
    monkeypatch.setattr(grammars_module, "MAX_WAITING", 3)
    made = Grammars(tokenizer, ENDS, VOCAB)
    go_on = threading.Event()
    for _ in range(grammars_module.NUM_THREADS):
        made._threads.submit(go_on.wait)
    waiting = [made.compile(Grammar("regex", text)) for text in "abc"]
    with pytest.raises(QueueFullError):
        made.compile(Grammar("regex", "d"))
    assert waiting[1].cancel()
    again = made.compile(Grammar("regex", "b"))
    assert again is not waiting[1]
    go_on.set()
    assert again.result(60).end_ids == ENDS
    made.close()


def test_where_no_process_can_be_had_it_is_to_be_tried_again(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Grammars(tokenizer, ENDS, VOCAB)

    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError("no process left")

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", refuse)
        failed = made.compile(Grammar("regex", "a"))
        with pytest.raises(QueueFullError, match="try again"):
            failed.result(60)
    assert made.compile(Grammar("regex", "a")).result(60).end_ids == ENDS
    made.close()


def test_a_model_that_cannot_end_has_no_grammars(tokenizer: Tokenizer) -> None:
    made = Grammars(tokenizer, frozenset(), VOCAB)
    with pytest.raises(GrammarError, match="no end id"):
        made.compile(Grammar("regex", "a")).result(60)
    made.close()


def test_closing_does_not_wait_for_what_compiles(tokenizer: Tokenizer) -> None:
    """A multiple of a large number is a state machine of as many states, which takes longer than
    a process may; here none gets so far, be it that its process is only being started."""
    made = Grammars(tokenizer, ENDS, VOCAB)
    made.compile(Grammar("regex", "a")).result(60)
    slow = [
        made.compile(Grammar("json_schema", json.dumps({"type": "integer", "multipleOf": n})))
        for n in (99999989, 99999971, 99999959)
    ]
    made.close()
    for future in slow:
        assert future.done()
        assert future.cancelled() or "too long" not in str(future.exception())
    made.close()
