"""The prompts of a request: JSON of any size -> texts or token ids -> token ids that may run.

Whatever a client sends, other streams go on meanwhile. What is long is decoded prompt by prompt in
a thread, is refused by its length before anything is built from it, and is tokenised in pieces.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from deltaserve.engine.tokenizer import Tokenizer

from .errors import ApiError
from .json_body import decode_field, invalid
from .protocol import MAX_CHOICES

SHORT_BYTES = 1 << 14
"""JSON up to here is decoded at once: to start a thread would take longer."""
SHORT_CHARS = 1 << 10
"""And a text is tokenised at once up to here."""
NORMALISED = 4
"""Unicode normalisation makes at most so many characters one. A text that cannot fit even so is
refused unread."""

Prompt = str | list[int]

_SPACE = re.compile(rb"[ \t\r\n]*")
_text: msgspec.json.Decoder[str] = msgspec.json.Decoder(str)
_ids: msgspec.json.Decoder[list[int]] = msgspec.json.Decoder(list[int])
_FORMS = "prompt: must be a string, a list of strings, a list of token ids or a list of those"


@dataclass(frozen=True)
class PromptLimits:
    """`max_tokens`: the context length. `max_chars`: no text of more characters can fit into it."""

    max_tokens: int
    max_chars: int
    vocab_limit: int

    @classmethod
    def of(cls, max_model_len: int, vocab_limit: int, tokenizer: Tokenizer) -> PromptLimits:
        return cls(
            max_tokens=max_model_len,
            max_chars=NORMALISED * max_model_len * tokenizer.max_token_bytes,
            vocab_limit=vocab_limit,
        )


async def read_prompts(raw: msgspec.Raw, limits: PromptLimits) -> list[Prompt]:
    """One text or list of ids each, none of them empty. Raises ApiError 400."""
    data = bytes(raw)
    if len(data) <= SHORT_BYTES:
        return _read(data, limits)
    return await asyncio.to_thread(_read, data, limits)


async def encode(
    tokenizer: Tokenizer, text: str, limits: PromptLimits, name: str = "prompt"
) -> list[int]:
    """Raises ApiError 400 as soon as the text is known to have more tokens than the context.
    `name`: the field that it came from."""
    if len(text) > limits.max_chars:
        raise invalid(
            name,
            f"the prompt has {len(text)} characters, more than the context length of "
            f"{limits.max_tokens} tokens can hold",
        )
    ids, end = await encode_until(tokenizer, text, limits.max_tokens)
    if end < len(text):
        raise invalid(
            name,
            f"the first {end} of the prompt's {len(text)} characters are {len(ids)} tokens, "
            f"more than the context length of {limits.max_tokens} tokens",
        )
    return ids


async def encode_until(tokenizer: Tokenizer, text: str, max_tokens: int) -> tuple[list[int], int]:
    """(ids, how many characters they are): all, or those after which there are too many ids."""
    if len(text) <= SHORT_CHARS:
        return tokenizer.encode(text), len(text)
    ids: list[int] = []
    end = 0
    while end < len(text) and len(ids) <= max_tokens:
        piece, end = await asyncio.to_thread(tokenizer.encode_piece, text, end)
        ids += piece
    return ids, end


def read_text(raw: msgspec.Raw) -> str:
    """A prompt that must be a string, maybe empty. Raises ApiError 400."""
    text: str = decode_field(_text, raw, "prompt")
    return text


async def read_ids(raw: msgspec.Raw, name: str, max_ids: int, vocab_limit: int) -> list[int]:
    """Token ids, maybe none, in the field `name`. Raises ApiError 400."""
    data = bytes(raw)
    if data.count(b",") >= max_ids:
        raise invalid(name, f"{name}: more than {max_ids} ids")
    if len(data) <= SHORT_BYTES:
        return _decode_ids(data, name, vocab_limit)
    return await asyncio.to_thread(_decode_ids, data, name, vocab_limit)


def _read(data: bytes, limits: PromptLimits) -> list[Prompt]:
    kind = data[:1]
    if kind == b'"':
        return [_read_text(data)]
    if kind != b"[":
        raise invalid("prompt", "prompt: must be a string or a list")
    at = _skip_space(data, 1)
    first = data[at : at + 1]
    if first == b"]":
        raise _empty()
    if first not in (b'"', b"["):
        return [_read_ids(data, limits)]
    prompts: list[Prompt] = []
    for element in _elements(data):
        if element[:1] != first:
            raise invalid("prompt", _FORMS)
        if len(prompts) == MAX_CHOICES:
            raise invalid("prompt", f"prompt: at most {MAX_CHOICES} prompts")
        prompts.append(_read_text(element) if first == b'"' else _read_ids(element, limits))
    return prompts


def _read_text(data: bytes) -> str:
    text: str = decode_field(_text, data, "prompt")
    if not text:
        raise _empty()
    return text


def _read_ids(data: bytes, limits: PromptLimits) -> list[int]:
    """The commas of a list of numbers tell its length before it is built."""
    num_tokens = data.count(b",") + 1
    if num_tokens > limits.max_tokens:
        raise invalid(
            "prompt",
            f"the prompt has {num_tokens} tokens, more than the context length of "
            f"{limits.max_tokens} tokens",
        )
    ids = _decode_ids(data, "prompt", limits.vocab_limit)
    if not ids:
        raise _empty()
    return ids


def _decode_ids(data: bytes, name: str, vocab_limit: int) -> list[int]:
    try:
        ids: list[int] = _ids.decode(data)
    except (msgspec.DecodeError, RecursionError):
        raise invalid(name, f"{name}: token ids must be integers in a list") from None
    for token_id in (min(ids, default=0), max(ids, default=0)):
        if not 0 <= token_id < vocab_limit:
            shown = token_id if abs(token_id) < 1 << 128 else "of more than 128 bits"
            raise invalid(name, f"{name}: token id {shown} is not in 0 .. {vocab_limit - 1}")
    return ids


def _empty() -> ApiError:
    return invalid("prompt", "prompt: must not be empty")


def _elements(data: bytes) -> Iterator[bytes]:
    """The texts or lists in a JSON array of them. `data` is known to be JSON; should a list hold
    anything but numbers, its piece is none and is refused when it is decoded."""
    at = _skip_space(data, 1)
    while True:
        kind = data[at : at + 1]
        if kind == b'"':
            end = _string_end(data, at)
        elif kind == b"[":
            end = data.find(b"]", at) + 1
        else:
            raise invalid("prompt", _FORMS)
        yield data[at:end]
        at = _skip_space(data, end)
        after = data[at : at + 1]
        if after == b"]":
            return
        if after != b",":
            raise invalid("prompt", _FORMS)
        at = _skip_space(data, at + 1)


def _skip_space(data: bytes, at: int) -> int:
    space = _SPACE.match(data, at)
    assert space is not None
    return space.end()


def _string_end(data: bytes, start: int) -> int:
    """Behind the quote that ends the string at `start`: one with an even number of \\ before it."""
    at = start
    while True:
        at = data.index(b'"', at + 1)
        first = at
        while data[first - 1 : first] == b"\\":
            first -= 1
        if (at - first) % 2 == 0:
            return at + 1
