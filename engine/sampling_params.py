"""What a client may ask of sampling, validated on construction with ValueError.

Token ids are checked against the model's vocabulary by `check_token_ids`, on admission.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from .grammar import Grammar

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 1024
MAX_ALLOWED_TOKEN_IDS = 2**18
MAX_BAD_WORDS = 128
MAX_BAD_WORD_IDS = 16
MAX_CACHE_SALT_CHARS = 256
_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    temperature 0 is greedy. top_k 0 or -1, top_p 1 and min_p 0 are off. `seed` None means one is
    drawn on admission. `logprobs` is the number of alternatives wanted (0 = the chosen token
    only, None = none), `prompt_logprobs` the same for the prompt's tokens; max_tokens may be 0
    only with the latter. `stop` strings end the text before the match, or after it with
    `include_stop_str_in_output`. `ignore_eos` keeps going past the model's end ids;
    `stop_token_ids` are further ones that it does not concern; neither kind is sampled before
    `min_tokens` tokens.

    presence_penalty and frequency_penalty count output tokens; repetition_penalty (1 is off)
    concerns ids of prompt and output. `logit_bias` adds to the logits of its ids. Only
    `allowed_token_ids` may be sampled, if given. `bad_words` are token id sequences that must not
    come up. The output follows `grammar`, and ends where that ends, `ignore_eos` or not. The larger
    `priority`, the later the request. `cache_salt` keeps its prefixes apart
    from those of others.
    """

    max_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    prompt_logprobs: int | None = None
    priority: int = 0
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    cache_salt: str | None = None
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        if self.prompt_logprobs is not None:
            _check_int("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        least = 1 if self.prompt_logprobs is None else 0
        _check_int("max_tokens", self.max_tokens, least, _MAX_INT32)
        _check_int("min_tokens", self.min_tokens, 0, _MAX_INT32)
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens: must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_int("top_k", self.top_k, -1, _MAX_INT32)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 0.01, 100.0)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_int("priority", self.priority, -(2**31), _MAX_INT32)
        self._check_stops()
        self._check_ids()
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise ValueError(f"{name}: must be true or false, got {type(value).__name__}")
        if self.cache_salt is not None:
            _check_salt(self.cache_salt)

    @property
    def uses_penalties(self) -> bool:
        """Whether the logits depend on which ids came before."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    def check_token_ids(self, vocab_limit: int) -> None:
        """ValueError if a parameter names an id that is not in 0 .. vocab_limit - 1."""
        by_field: dict[str, Iterable[int]] = {
            "logit_bias": (token_id for token_id, _ in self.logit_bias),
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words": (token_id for word in self.bad_words for token_id in word),
            "stop_token_ids": self.stop_token_ids,
        }
        for name, ids in by_field.items():
            highest = max(ids, default=0)
            if highest >= vocab_limit:
                raise ValueError(
                    f"{name}: the model's token ids are 0 to {vocab_limit - 1}, got {highest}"
                )

    def _check_stops(self) -> None:
        _check_length("stop", len(self.stop), MAX_STOP_STRINGS, "strings")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError("stop: every stop must be a non-empty string")
        _check_length("stop_token_ids", len(self.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids")
        _check_token_ids("stop_token_ids", self.stop_token_ids)

    def _check_ids(self) -> None:
        _check_length("logit_bias", len(self.logit_bias), MAX_LOGIT_BIAS, "ids")
        _check_token_ids("logit_bias", [token_id for token_id, _ in self.logit_bias])
        if len({token_id for token_id, _ in self.logit_bias}) < len(self.logit_bias):
            raise ValueError("logit_bias: names an id twice")
        for _, bias in self.logit_bias:
            _check_float("logit_bias", bias, -100.0, 100.0)
        if self.allowed_token_ids is not None:
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids: must not be empty")
            count = len(self.allowed_token_ids)
            _check_length("allowed_token_ids", count, MAX_ALLOWED_TOKEN_IDS, "ids")
            _check_token_ids("allowed_token_ids", self.allowed_token_ids)
        _check_length("bad_words", len(self.bad_words), MAX_BAD_WORDS, "sequences")
        for word in self.bad_words:
            if not word:
                raise ValueError("bad_words: every sequence must hold at least one token id")
            _check_length("bad_words", len(word), MAX_BAD_WORD_IDS, "ids a sequence")
            _check_token_ids("bad_words", word)


def _check_salt(salt: object) -> None:
    if not isinstance(salt, str):
        raise ValueError(f"cache_salt: must be a string, got {type(salt).__name__}")
    _check_length("cache_salt", len(salt), MAX_CACHE_SALT_CHARS, "characters")
    if not salt:
        raise ValueError("cache_salt: must not be empty")
    if any("\ud800" <= char <= "\udfff" for char in salt):  # it is hashed as UTF-8
        raise ValueError("cache_salt: has a lone surrogate, which is no character")


def _check_length(name: str, length: int, limit: int, unit: str) -> None:
    if length > limit:
        raise ValueError(f"{name}: at most {limit} {unit}, got {length}")


def _check_token_ids(name: str, ids: SequenceOf[int]) -> None:
    """There may be as many as the vocabulary has, on both sides of the engine's border."""
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) <= _MAX_INT32:
        return
    for token_id in ids:
        _check_int(name, token_id, 0, _MAX_INT32)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name}: must be an integer, got {type(value).__name__}")
    if not low <= value <= high:
        raise ValueError(f"{name}: must be between {low} and {high}, got {value}")


def _check_float(name: str, value: object, low: float, high: float, low_open: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{name}: must be a number, got {type(value).__name__}")
    # false for NaN and infinities; an integer may be too large for math.isfinite
    if not ((low < value if low_open else low <= value) and value <= high):
        bound = "(" if low_open else "["
        raise ValueError(f"{name}: must be in {bound}{low:g}, {high:g}], got {value}")
