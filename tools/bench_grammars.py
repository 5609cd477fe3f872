"""What masks of grammars cost at the vocabulary of Qwen3.5: 248,320 ids.

    python -m tools.bench_grammars [--tokens 120] [--rows 64]

The vocabulary is made up: every byte, words of random letters with and without a space before
them, CJK, punctuation and digits. Each grammar is followed by outputs drawn evenly from what it
allows, which meets far more odd states than a model does. Times are of the CPU, in one thread, so
that they can be compared on a machine that does something else too; the last line is by the clock,
of many rows at once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import time
from functools import cached_property
from typing import Any

import numpy as np

from deltaserve.engine.grammar import Grammar
from deltaserve.engine.grammar_state import CompiledGrammar, GrammarState, MaskFiller
from deltaserve.engine.grammars import Grammars

VOCAB = 248_320
NUM_TEXT, END_ID = 248_000, 248_000
LETTERS = "etaoinshrdlucmfwypvbgkqjxz"
SIGNS = "{}[]()\"':;,.<>/\\|!@#$%^&*-_=+ \n\t0123456789"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 40},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b", "c d"]}, "maxItems": 4},
        "note": {"$ref": "#/$defs/note"},
    },
    "required": ["name", "age", "tags", "note"],
    "additionalProperties": False,
    "$defs": {
        "note": {
            "type": "object",
            "properties": {"text": {"type": "string"}, "next": {"$ref": "#/$defs/note"}},
            "required": ["text"],
            "additionalProperties": False,
        }
    },
}
ITEMS = {
    "type": "array",
    "minItems": 20,
    "items": {
        "type": "object",
        "properties": {
            "id": {"type": "string", "pattern": "^[a-z]{2,8}-[0-9]{3,6}$"},
            "kind": {"enum": [f"value {n}" for n in range(500)]},
        },
        "required": ["id", "kind"],
        "additionalProperties": False,
    },
}
ARITHMETIC = """root ::= expr
expr ::= term (("+" | "-") term)*
term ::= num | "(" expr ")"
num ::= [0-9]+"""
GRAMMARS = {
    "any JSON object": Grammar("json_schema", '{"type": "object"}'),
    "schema, nested, with references": Grammar("json_schema", json.dumps(PERSON)),
    "schema, pattern, enum of 500": Grammar("json_schema", json.dumps(ITEMS)),
    "regular expression, e-mails": Grammar("regex", r"([a-z.]{3,40}@[a-z]+\.(com|org), ?){5,90}"),
    "choice of 1,000": Grammar("choice", json.dumps([f"option {n} of them" for n in range(1000)])),
    "GBNF, arithmetic": Grammar("grammar", ARITHMETIC),
}


class Vocabulary:
    """Stands in for a `Tokenizer`."""

    special_ids = added_ids = frozenset({END_ID})
    vocab_limit = END_ID + 1

    def __init__(self) -> None:
        rng = random.Random(0)
        tokens = dict.fromkeys(bytes([byte]) for byte in range(256))
        while len(tokens) < NUM_TEXT:
            length, draw = rng.choice((2, 3, 4, 5, 6, 7, 8, 9, 10, 12)), rng.random()
            if draw < 0.75:
                word = "".join(rng.choices(LETTERS, weights=range(26, 0, -1), k=length))
                token = rng.choice((" ", "")) + (word if rng.random() < 0.7 else word.title())
            elif draw < 0.9:
                token = "".join(chr(rng.randrange(0x4E00, 0x9FFF)) for _ in range(1 + length // 4))
            else:
                token = "".join(rng.choices(SIGNS, k=1 + length // 3))
            tokens[token.encode()] = None
        self.tokens = [*tokens, b"<|im_end|>"]

    @cached_property
    def _ids(self) -> dict[bytes, int]:
        return {token: id_ for id_, token in enumerate(self.tokens[:NUM_TEXT])}

    def token_bytes(self, token_id: int) -> bytes:
        return self.tokens[token_id]

    def encode(self, text: str) -> list[int]:
        """The longest token each time."""
        data, ids = text.encode(), []
        while data:
            size = next(n for n in range(min(40, len(data)), 0, -1) if data[:n] in self._ids)
            ids.append(self._ids[data[:size]])
            data = data[size:]
        return ids


def draw(mask: np.ndarray, rng: random.Random) -> int:
    """One of the ids allowed; a quote now and then, so that strings end."""
    ids = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    quote = ord('"')
    return quote if quote in ids and rng.random() < 0.1 else int(rng.choice(ids))


def mask_microseconds(compiled: CompiledGrammar, num_tokens: int) -> np.ndarray:
    """Of each token of six outputs: taking the one before and computing the mask."""
    filler, times = MaskFiller(1), []
    for seed in range(6):
        state, rng, output = GrammarState(compiled, ()), random.Random(seed), list[int]()
        masks = np.empty((1, VOCAB // 32), np.uint32)
        while len(output) < num_tokens and END_ID not in output:
            began = time.thread_time()
            state.advance(output)
            filler.fill([(state, 0)], masks)
            times.append((time.thread_time() - began) * 1e6)
            output.append(draw(masks[0], rng))
    return np.array(times)


def rows_milliseconds(compiled: CompiledGrammar, rows: int, threads: int) -> float:
    """Of the masks of one step, by the clock, the first one apart."""
    states = [(GrammarState(compiled, ()), row) for row in range(rows)]
    outputs: list[list[int]] = [[] for _ in states]
    masks, filler, rng, times = (
        np.empty((rows, VOCAB // 32), np.uint32),
        MaskFiller(threads),
        random.Random(0),
        [],
    )
    for _ in range(30):
        for (state, _), output in zip(states, outputs, strict=True):
            state.advance(output)
        began = time.perf_counter()
        filler.fill(states, masks)
        times.append((time.perf_counter() - began) * 1e3)
        for output, mask in zip(outputs, masks, strict=True):
            output.append(draw(mask, rng))
    return float(np.mean(times[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=120, help="of each of six outputs")
    parser.add_argument("--rows", type=int, default=64)
    options = parser.parse_args()
    vocabulary: Any = Vocabulary()
    grammars = Grammars(vocabulary, frozenset({END_ID}), VOCAB)
    before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    grammars.compile(Grammar("regex", "a")).result()
    taken = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"vocabulary: {time.process_time() - began:.2f} s of CPU, {taken >> 10} MB, once")
    print("| grammar | compiled in ms | us a mask: mean | p50 | p99 | max |\n" + "|---" * 6 + "|")
    for name, grammar in GRAMMARS.items():
        began = time.perf_counter()
        compiled = grammars.compile(grammar).result()
        took = (time.perf_counter() - began) * 1e3
        us = mask_microseconds(compiled, options.tokens)
        figures = (us.mean(), *np.percentile(us, (50, 99)), us.max())
        print(f"| {name} | {took:.0f} | " + " | ".join(f"{f:.0f}" for f in figures) + " |")
    threads = min(8, os.cpu_count() or 1)
    compiled = grammars.compile(GRAMMARS["schema, nested, with references"]).result()
    ms = rows_milliseconds(compiled, options.rows, threads)
    print(f"{options.rows} rows of the nested schema, {threads} threads: {ms:.1f} ms a step")
    grammars.close()


if __name__ == "__main__":
    main()
