"""The model's vocabulary as llguidance has it: the bytes of every id, and which ids are no text."""

from __future__ import annotations

import json
import re
import threading
from functools import cached_property

from llguidance import LLTokenizer

from .grammar_check import make_tokenizer
from .tokenizer import Tokenizer

NEWLINES = (b"\n", b"\n\n")
MAX_FORCED_CHARS = 256


class GrammarVocabulary:
    """Ids below `vocab_size`; special tokens, `end_ids` and ids without a token are in no text.

    `tokenizer` takes a second or two to make at 250,000 tokens, and holds the GIL; any thread may
    ask for it.
    """

    def __init__(self, tokenizer: Tokenizer, end_ids: frozenset[int], vocab_size: int) -> None:
        self.end_ids = end_ids
        self._source = tokenizer
        self._vocab_size = vocab_size
        self._no_text = tokenizer.special_ids | end_ids
        texts = [tokenizer.token_bytes(id_).decode() for id_ in self._no_text]
        cuts = (f"(?<={re.escape(text[0])})(?={re.escape(text[1:])})" for text in texts if text)
        self._written_specials = re.compile("|".join(cuts))
        self._lock = threading.Lock()

    @property
    def tokenizer(self) -> LLTokenizer:
        with self._lock:
            return self._tokenizer

    @property
    def newline_ids(self) -> frozenset[int]:
        """Tokens that are one or two newlines and nothing else."""
        with self._lock:
            return self._newline_ids

    @cached_property
    def small(self) -> bytes:
        """A line for `grammar_check`: the added tokens by id, and every byte as some id."""
        source = self._source
        tokens = {id_: source.token_bytes(id_) for id_ in source.added_ids}
        free = (id_ for id_ in range(self._vocab_size) if id_ not in tokens)
        tokens |= {id_: bytes([byte]) for id_, byte in zip(free, range(256), strict=False)}
        content = {
            "size": self._vocab_size,
            "tokens": {id_: token.hex() for id_, token in tokens.items()},
            "special": sorted(self._no_text),
            "end": sorted(self.end_ids),
        }
        return json.dumps(content).encode() + b"\n"

    @cached_property
    def _bytes(self) -> list[bytes]:
        limit = min(self._source.vocab_limit, self._vocab_size)
        known = [self._source.token_bytes(id_) for id_ in range(limit)]
        return known + [b""] * (self._vocab_size - limit)

    @cached_property
    def _newline_ids(self) -> frozenset[int]:
        return frozenset(id_ for id_, token in enumerate(self._bytes) if token in NEWLINES)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        special, end = sorted(self._no_text), sorted(self.end_ids)
        return make_tokenizer(self._bytes, special, end, self._encode)

    def _encode(self, text: str | bytes) -> list[int]:
        """Of text that a grammar forces, the next token of which is asked for. What reads like a
        special token is text there, and no end of anything: it is cut behind its first character.
        """
        text = (text if isinstance(text, str) else text.decode())[:MAX_FORCED_CHARS]
        ids = self._source.encode(text)
        if self._no_text.isdisjoint(ids):
            return ids
        pieces = self._written_specials.split(text)
        return [id_ for piece in pieces for id_ in self._source.encode(piece)]
