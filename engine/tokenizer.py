"""Tokenizer: a checkpoint's tokenizer.json as ids and bytes.

Owns encoding, the bytes of each token and which tokens are special. Text that grows token by token
is `incremental_decode`; chat templates are the server's.

Only byte-level BPE is served: there each token is a string of bytes, so that text of any run of
tokens is the bytes of each, joined, read as UTF-8.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as BpeTokenizer

END_TOKENS = ("<|im_end|>", "<|endoftext|>")
"""Both end a turn, whatever the checkpoint's config lists."""
MARKUP_TOKENS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Text like any other, to be read in the output, also where a checkpoint calls them special."""


def _byte_level_alphabet() -> dict[int, int]:
    """Code point in a vocabulary entry -> byte. Printable Latin-1 stands for itself, the other 68
    bytes are 256, 257, ... in order (the byte-level BPE convention of GPT-2)."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {256 + i: byte for i, byte in enumerate(others)}


_ALPHABET = _byte_level_alphabet()

PIECE_CHARS = 1 << 15
_AFTER_WORDS = " \n,.;:\uff0c\u3002\u3001\uff1b\uff1a"
"""What may end a piece's last word, as far as the tokenizer has it so; the last are Chinese."""


class Tokenizer:
    """The tokenizer of the checkpoint in `model_path`.

    Raises ValueError, naming the file, where it is missing, unreadable or not byte-level BPE.
    Tokens that tokenizer_config.json adds to tokenizer.json are added here too.
    """

    def __init__(self, model_path: str | Path) -> None:
        self.directory = Path(model_path)
        path = self.directory / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{path}: no such file; the checkpoint needs its tokenizer.json")
        try:
            self._bpe = BpeTokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{path}: not a readable tokenizer.json ({error})") from error
        base = self._bpe.get_vocab(with_added_tokens=False)
        _require_byte_level(self._bpe, base, path)
        _add_config_tokens(self._bpe, path.with_name("tokenizer_config.json"))
        added = self._bpe.get_added_tokens_decoder()
        self._bytes: dict[int, bytes] = {id_: t.content.encode() for id_, t in added.items()}
        self.added_ids = frozenset(added)
        self.special_ids = frozenset(
            id_
            for id_, token in added.items()
            if token.special and token.content not in MARKUP_TOKENS
        )
        self.vocab_limit = 1 + max((*base.values(), *added))
        self.max_token_bytes = max(map(len, (*base, *(t.content.encode() for t in added.values()))))
        ids = (self._bpe.token_to_id(token) for token in END_TOKENS)
        self.end_ids = frozenset(id_ for id_ in ids if id_ is not None)
        self._cut = _cut_pattern(self._bpe, list(added.values()))

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Special tokens written in the text become their ids. Releases the GIL while it works.

        Raises ValueError for text that is not valid Unicode (a lone surrogate).
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"the text is not valid Unicode: {error.reason}") from error
        # encode() would hold the GIL, and an encoding with offsets while it is freed
        return self._bpe.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def encode_piece(self, text: str, start: int) -> tuple[list[int], int]:
        """(ids, end) of about PIECE_CHARS characters from `start` on; `end` is where the next
        piece starts. The ids of all pieces, joined, are `encode(text)`.

        So a long text can be left halfway, and what holds the GIL stays short. Cuts are made
        between a word and the space, line break or mark behind it, where no token reaches across.
        """
        end = start + PIECE_CHARS
        while self._cut and end < len(text):  # windows, so that a search gives up the GIL
            cut = self._cut.search(text, end, end + PIECE_CHARS)
            if cut is not None:
                return self.encode(text[start : cut.end()]), cut.end()
            end += PIECE_CHARS - 1
        return self.encode(text[start:]), len(text)

    def affixes(self) -> tuple[list[int], list[int]]:
        """What `add_special_tokens` puts before and after the ids of a text."""
        plain, full = self.encode("a"), self.encode("a", add_special_tokens=True)
        for start in range(len(full) - len(plain) + 1):
            if full[start : start + len(plain)] == plain:
                return full[:start], full[start + len(plain) :]
        raise AssertionError("a post-processor that changes the text's own tokens")

    def bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """For `SamplingParams.bad_words`: each word as it stands at the start of a text and, where
        one token begins it there too, after a space (vLLM's rule). ValueError for an empty word."""
        sequences: list[tuple[int, ...]] = []
        for word in words:
            bare = tuple(self.encode(word.lstrip()))
            if not bare:
                raise ValueError("bad_words: every word must hold more than spaces")
            sequences.append(bare)
            spaced = tuple(self.encode(" " + word.lstrip()))
            if spaced[0] != bare[0] and len(spaced) == len(bare):
                sequences.append(spaced)
        return tuple(dict.fromkeys(sequences))

    def vocabulary_entry(self, token_id: int) -> str:
        """A token as tokenizer.json writes it; an id without a token is the empty string."""
        return self._bpe.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; an id without a token stands for none."""
        known = self._bytes.get(token_id)
        if known is None:
            token = self._bpe.id_to_token(token_id) if token_id >= 0 else None
            known = b"" if token is None else bytes(_ALPHABET[ord(char)] for char in token)
            self._bytes[token_id] = known
        return known

    def token_text(self, token_id: int) -> str:
        """A token on its own, as log-probabilities show it: `bytes:\\xe2\\x98` where it is not
        whole characters."""
        data = self.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD."""
        skip = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(id_) for id_ in token_ids if id_ not in skip)
        return data.decode(errors="replace")


def _require_byte_level(bpe: BpeTokenizer, vocab: dict[str, int], path: Path) -> None:
    if type(bpe.model).__name__ != "BPE" or type(bpe.decoder).__name__ != "ByteLevel":
        raise ValueError(
            f"{path}: needs a byte-level BPE tokenizer, found {type(bpe.model).__name__} with "
            f"decoder {type(bpe.decoder).__name__}"
        )
    foreign = {char for char in set("".join(vocab)) if ord(char) not in _ALPHABET}
    if foreign:
        raise ValueError(f"{path}: vocabulary entries with {min(foreign)!r}, which is no byte")


def _cut_pattern(bpe: BpeTokenizer, added: list[AddedToken]) -> re.Pattern[str] | None:
    """Matches a letter behind which a text may be cut: where words end, whatever follows, and no
    added token reaches across. None: nowhere."""
    if bpe.pre_tokenizer is None or any(token.lstrip or token.rstrip for token in added):
        return None
    split = bpe.pre_tokenizer.pre_tokenize_str
    if split("ab") != [("ab", (0, 2))]:  # each piece would be given a space
        return None
    contents = "".join(token.content for token in added)
    ends = [c for c in _AFTER_WORDS if c not in contents and split(f"ab{c}cd")[0][1] == (0, 2)]
    return re.compile(rf"[^\W\d_](?=[{re.escape(''.join(ends))}])") if ends else None


def _add_config_tokens(bpe: BpeTokenizer, path: Path) -> None:
    """Adds what `added_tokens_decoder` lists beyond tokenizer.json, under the listed ids."""
    if not path.is_file():
        return
    try:
        listed: dict[str, dict[str, Any]] = json.loads(path.read_bytes()).get(
            "added_tokens_decoder", {}
        )
        missing = sorted(
            (int(id_), str(token["content"]), token)
            for id_, token in listed.items()
            if bpe.id_to_token(int(id_)) is None
        )
    except (OSError, ValueError, AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{path}: not a readable tokenizer_config.json ({error})") from error
    for token_id, content, token in missing:
        flags = {
            name: bool(token.get(name, False))
            for name in ("special", "normalized", "lstrip", "rstrip", "single_word")
        }
        bpe.add_tokens([AddedToken(content, **flags)])
        if bpe.token_to_id(content) != token_id:
            raise ValueError(
                f"{path}: added token {token['content']!r} has id {token_id} there, but would get "
                f"{bpe.token_to_id(token['content'])} after tokenizer.json"
            )
