"""The prompt in an answer: echoed text, its log-probabilities, and vLLM's `prompt_logprobs`."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from deltaserve.engine.incremental_decode import IncrementalDecoder
from deltaserve.engine.sequence import TokenLogprobs
from deltaserve.engine.tokenizer import Tokenizer

from .protocol import Logprobs, PromptLogprob, PromptLogprobs

MIN_LOGPROB = -9999.0  # JSON has no infinity


def finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)


class PromptEcho:
    """One prompt, shared by its n choices. The text is all of it, special tokens too.

    A prompt that ends inside a character ends in U+FFFD here; the output has none of its bytes.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Seq[int]) -> None:
        self._tokenizer = tokenizer
        self._prompt_ids = prompt_ids
        decoder = IncrementalDecoder(tokenizer, skip_special_tokens=False)
        pieces: list[str] = []
        self._offsets: list[int] = []
        """Of each token: characters before the first one that it has a part in."""
        num_chars = 0
        for token_id in prompt_ids:
            self._offsets.append(num_chars)
            pieces.append(decoder.push(token_id))
            num_chars += len(pieces[-1])
        self.text = "".join(pieces) + decoder.finish()

    def logprobs(self, prompt_logprobs: Seq[TokenLogprobs], num_top: int) -> Logprobs:
        """`prompt_logprobs` are of the tokens from the second on, with at least `num_top`."""
        assert len(prompt_logprobs) == len(self._prompt_ids) - 1
        text = self._tokenizer.token_text
        tokens = [text(token_id) for token_id in self._prompt_ids]
        tops: list[dict[str, float] | None] = [None]
        for token, entry in zip(tokens[1:], prompt_logprobs, strict=True):
            top: dict[str, float] = {}
            alternatives = zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False)
            for token_id, value in alternatives:
                top.setdefault(text(token_id), finite(value))
            top.setdefault(token, finite(entry.logprob))
            tops.append(top)
        return Logprobs(
            tokens=tokens,
            token_logprobs=[None, *(finite(entry.logprob) for entry in prompt_logprobs)],
            top_logprobs=tops,
            text_offset=list(self._offsets),
        )


def vllm_prompt_logprobs(
    tokenizer: Tokenizer,
    prompt_ids: Seq[int],
    prompt_logprobs: Seq[TokenLogprobs],
    num_top: int,
) -> PromptLogprobs:
    """Null for the first token, then for each the `num_top` likeliest ids and its own."""
    text = tokenizer.token_text
    entries: PromptLogprobs = [None]
    for token_id, entry in zip(prompt_ids[1:], prompt_logprobs, strict=True):
        alternatives = zip(entry.top_ids[:num_top], entry.top_logprobs, strict=False)
        of_ids = {
            id_: PromptLogprob(finite(value), rank, text(id_))
            for rank, (id_, value) in enumerate(alternatives, 1)
        }
        own = PromptLogprob(finite(entry.logprob), entry.rank, text(token_id))
        entries.append({token_id: own} | of_ids)
    return entries


def joined(first: Logprobs, second: Logprobs, shift: int) -> Logprobs:
    """`second` behind `first`, its offsets counted from `shift`."""
    return Logprobs(
        tokens=first.tokens + second.tokens,
        token_logprobs=first.token_logprobs + second.token_logprobs,
        top_logprobs=first.top_logprobs + second.top_logprobs,
        text_offset=first.text_offset + [shift + offset for offset in second.text_offset],
    )
