"""What a client may ask of sampling, validated on construction with ValueError."""

from __future__ import annotations

from dataclasses import dataclass

MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request.

    temperature 0 is greedy. top_k 0 or -1, top_p 1 and min_p 0 are off. `seed` None means one is
    drawn on admission. `logprobs` is the number of alternatives wanted (0 = the chosen token
    only, None = none). `stop` strings end the text before the match. `ignore_eos` keeps going
    past the model's end ids.
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

    def __post_init__(self) -> None:
        _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**64 - 1)
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if len(self.stop) > MAX_STOP_STRINGS:
            raise ValueError(f"stop: at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}")
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ValueError("stop: every stop must be a non-empty string")


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
