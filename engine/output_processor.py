"""OutputProcessor: one request's tokens -> text, stop strings, usage, log-probabilities.

Shared by the HTTP workers and `LLM`. End ids are the engine's; stop strings are decided here, and
whoever holds the processor then aborts the request in the engine.

    decoded text   |-- released --|-- held back --|
                                  ^ may still become a stop string

Of several stop strings the one that is complete first wins, of those complete at the same character
the longest: then the result does not depend on how the text was cut into tokens and steps.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import NamedTuple

from .incremental_decode import IncrementalDecoder
from .sampling_params import SamplingParams
from .sequence import FinishReason, RequestOutput, TokenLogprobs
from .tokenizer import Tokenizer


@dataclass(frozen=True)
class TextLogprob:
    """Log-probabilities of one output token, with text.

    `text_offset`: characters of the output before the first one this token has a part in. `top`:
    alternatives, likeliest first, as (token, log-probability); `top_ids` are their ids.
    """

    token_id: int
    token: str
    logprob: float
    text_offset: int
    top: tuple[tuple[str, float], ...]
    top_ids: tuple[int, ...]


class TextOutput(NamedTuple):
    """What one RequestOutput adds to the text of its request. (A named tuple, as that is, for
    speed.)

    `token_ids` count as usage; with a stop string they end at the token that completed it.
    `stop_reason` is the stop string or the end id's number where one of them ended the text.
    `must_abort`: the text has ended and the engine does not know yet. The other fields are as the
    engine gave them.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TextLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    must_abort: bool = False
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    num_cached_tokens: int = 0
    error_param: str | None = None


class StopChecker:
    """Finds the first stop string in text that arrives in pieces.

    `include`: the stop string itself is part of the text.
    """

    def __init__(self, stops: Seq[str], include: bool = False) -> None:
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, text: str, check: bool = True) -> tuple[str, str | None]:
        """(text that can be released, the stop string found or None). Nothing may follow a stop.

        Without `check` a stop string that ends in this piece is text like any other.
        """
        if not self._stops:
            return text, None
        num_held = len(self._held)
        text = self._held + text
        found: tuple[int, int, str] | None = None  # (end, start, stop)
        for stop in self._stops if check else ():
            start = text.find(stop, max(num_held + 1 - len(stop), 0))
            if start >= 0 and (found is None or (start + len(stop), start) < found[:2]):
                found = (start + len(stop), start, stop)
        if found is not None:
            self._held = ""
            return text[: found[0] if self._include else found[1]], found[2]
        keep = max(overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], None

    def finish(self) -> str:
        """What was held back: the text ends without a stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, wanted: str) -> int:
    """Length of the longest end of `text` that `wanted` begins with, less than all of `wanted`."""
    for length in range(min(len(wanted) - 1, len(text)), 0, -1):
        if text.endswith(wanted[:length]):
            return length
    return 0


class OutputProcessor:
    """Of one request, from its first output to its last. `num_prompt_tokens` is for usage.

    `token_starts`: where it is an array, characters of the output before each token of it (but an
    end id) are added there.
    """

    def __init__(
        self, tokenizer: Tokenizer, params: SamplingParams, num_prompt_tokens: int
    ) -> None:
        self.num_prompt_tokens = num_prompt_tokens
        self.num_output_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.token_starts: array[int] | None = None
        self._tokenizer = tokenizer
        self._decoder = IncrementalDecoder(tokenizer, params.skip_special_tokens)
        self._stop = StopChecker(params.stop, params.include_stop_str_in_output)
        self._include_stop = params.include_stop_str_in_output
        self._min_tokens = params.min_tokens
        self._num_chars = 0  # decoded so far, held back or not

    def process(self, output: RequestOutput) -> TextOutput:
        """Outputs after the end (a step that was in flight) add nothing."""
        if self.finish_reason is not None:
            return TextOutput("", (), finish_reason=self.finish_reason)
        pieces: list[str] = []
        logprobs: list[TextLogprob] = []
        last = len(output.token_ids) - 1
        for i, token_id in enumerate(output.token_ids):
            self.num_output_tokens += 1
            if output.logprobs:
                logprobs.append(self._text_logprob(token_id, output.logprobs[i]))
            if i == last and output.stop_id is not None and not self._include_stop:
                break  # an end id is not text
            if self.token_starts is not None:
                self.token_starts.append(self._num_chars)
            stop = self._push(self._decoder.push(token_id), pieces)
            if stop is not None:
                return self._stopped(output, i + 1, pieces, logprobs, stop)
        if output.finish_reason is not None:
            stop = self._push(self._decoder.finish(), pieces)
            if stop is not None:
                return self._stopped(output, last + 1, pieces, logprobs, stop)
            pieces.append(self._stop.finish())
        self.finish_reason = output.finish_reason
        return TextOutput(
            text="".join(pieces),
            token_ids=output.token_ids,
            logprobs=tuple(logprobs),
            finish_reason=output.finish_reason,
            stop_reason=output.stop_id,
            error=output.error,
            prompt_logprobs=output.prompt_logprobs,
            num_cached_tokens=output.num_cached_tokens,
            error_param=output.error_param,
        )

    def _push(self, text: str, pieces: list[str]) -> str | None:
        self._num_chars += len(text)
        released, stop = self._stop.push(text, self.num_output_tokens > self._min_tokens)
        pieces.append(released)
        return stop

    def _stopped(
        self,
        output: RequestOutput,
        num_tokens: int,
        pieces: list[str],
        logprobs: list[TextLogprob],
        stop: str,
    ) -> TextOutput:
        self.finish_reason = FinishReason.STOP
        return TextOutput(
            text="".join(pieces),
            token_ids=output.token_ids[:num_tokens],
            logprobs=tuple(logprobs),
            finish_reason=FinishReason.STOP,
            stop_reason=stop,
            must_abort=output.finish_reason is None,
            prompt_logprobs=output.prompt_logprobs,
            num_cached_tokens=output.num_cached_tokens,
        )

    def _text_logprob(self, token_id: int, logprobs: TokenLogprobs) -> TextLogprob:
        text = self._tokenizer.token_text
        return TextLogprob(
            token_id=token_id,
            token=text(token_id),
            logprob=logprobs.logprob,
            text_offset=self._num_chars,
            top=tuple(
                (text(id_), value)
                for id_, value in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
            ),
            top_ids=logprobs.top_ids,
        )
