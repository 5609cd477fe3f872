"""IncrementalDecoder: the text of a sequence of tokens while it grows.

Only whole characters come out. The bytes of a character that later tokens may complete are held
back; bytes that no continuation can save become U+FFFD at once. The pieces, joined, are always
`Tokenizer.decode` of the tokens so far, less the bytes held back.
"""

from __future__ import annotations

import codecs

from .tokenizer import Tokenizer

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class IncrementalDecoder:
    """Starts at the first output token: bytes of a prompt that ends inside a character belong to
    the prompt, and nothing of them appears here."""

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._utf8 = _Utf8Decoder(errors="replace")

    def push(self, token_id: int) -> str:
        """The text that this token completes."""
        if token_id in self._skip:
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """What was held back, as U+FFFD: no token can complete it any more."""
        return self._utf8.decode(b"", final=True)
