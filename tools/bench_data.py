"""The prompts of a benchmark: random, with shared prefixes, or from a JSONL file.

A prompt depends on a seed and its index alone, so that a run can be repeated.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

_WORDS = (
    *("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by"),
    *("time", "people", "water", "light", "house", "river", "stone", "field", "story", "music"),
    *("not", "he", "this", "are", "or", "his", "from", "at", "which", "but", "have", "an", "had"),
)


@dataclass(frozen=True)
class Prompt:
    """`content` is token ids or text; None tokens: as many as the run says."""

    content: list[int] | str
    max_tokens: int | None = None


@dataclass(frozen=True)
class RandomPrompts:
    """`input_len` random ids from `low` to `high` - 1, or as many random words (`text`).

    The first `prefix_len` of them are one of `num_prefixes` prefixes, in turn.
    """

    input_len: int
    low: int = 0
    high: int = 1000
    text: bool = False
    prefix_len: int = 0
    num_prefixes: int = 1

    def __post_init__(self) -> None:
        if self.input_len < 1 or not 0 <= self.prefix_len <= self.input_len:
            raise ValueError(
                f"a prompt needs at least 1 token and no longer prefix: "
                f"{self.input_len} tokens, {self.prefix_len} of them shared"
            )
        if not 0 <= self.low < self.high:
            raise ValueError(f"token ids: {self.low} .. {self.high} holds none")
        if self.num_prefixes < 1:
            raise ValueError("at least one prefix")

    def prompt(self, seed: str, index: int) -> Prompt:
        shared = self._items(f"{seed} prefix {index % self.num_prefixes}", self.prefix_len)
        items = shared + self._items(f"{seed} {index}", self.input_len - self.prefix_len)
        if self.text:
            return Prompt(" ".join(_WORDS[item % len(_WORDS)] for item in items))
        return Prompt(items)

    def _items(self, seed: str, count: int) -> list[int]:
        return random.Random(seed).choices(range(self.low, self.high), k=count)


@dataclass(frozen=True)
class FilePrompts:
    """The lines of a JSONL file, shuffled by the seed and repeated as often as needed.

    Each line is an object with `prompt`, a text or a list of token ids, and perhaps `max_tokens`.
    """

    prompts: tuple[Prompt, ...]

    @classmethod
    def read(cls, path: Path) -> FilePrompts:
        """Raises ValueError, naming the line, for what is no prompt."""
        prompts = []
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                content, max_tokens = row["prompt"], row.get("max_tokens")
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{path}:{number}: no JSON object with a prompt") from error
            ids = isinstance(content, list) and all(type(item) is int for item in content)
            if not content or not (ids or isinstance(content, str)):
                raise ValueError(f"{path}:{number}: prompt is no text and no list of token ids")
            prompts.append(Prompt(content, max_tokens))
        if not prompts:
            raise ValueError(f"{path}: no prompts")
        return cls(tuple(prompts))

    def prompt(self, seed: str, index: int) -> Prompt:
        cycle, place = divmod(index, len(self.prompts))
        order = list(range(len(self.prompts)))
        random.Random(f"{seed} {cycle}").shuffle(order)
        return self.prompts[order[place]]


Prompts = RandomPrompts | FilePrompts
