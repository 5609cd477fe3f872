"""Texts that the demo model is checked with: prompts to go on from, and whole documents to be fed.

Training draws documents without end from generators seeded with integers; `held_out` seeds the same
generators with words, and asks for keys that training leaves out. A story, its names and what
happens are thus put together anew. The facts are those of training, which has no others: only their
choice and order is new. Texts of the source packages (novels, word meanings, countries' pages),
which the repository does not have, are not among them.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tools.demo_chat import conversation
from tools.demo_corpus import chat_renderer
from tools.demo_facts import facts_document
from tools.demo_recall import make_key, passage, subjects
from tools.demo_stories import story

MAX_DISTANCE_CHARS = 600
"""Between a key and its question: one or two stories lie there."""

PROMPTS = (
    "The capital of France is",
    "The capital of Japan is",
    "Once upon a time",
    "Water boils at",
    "The sun",
    "A",
    "1, 2, 3, 4,",
    "def main():",
    "The largest planet is",
    "In the morning the farmer",
    "She opened the door and",
    "What is the capital of Italy?",
    "The colour of the sky is",
    "There was a little dog who",
    "Two plus two is",
    "The river ran",
    "A story about a bear: ",
    "Yes",
    "The key is 7. " * 20 + "The key is",
    "Once there was a girl. She had a red ball. " * 30,
)
"""Many of them are unlike anything in training, so that the model knows no next word."""


def held_out(kind: str, count: int) -> list[str]:
    """The first `count` documents of a kind of the corpus."""
    rng = random.Random(f"held out {kind}")
    return [_DOCUMENTS[kind](rng) for _ in range(count)]


def _facts(rng: random.Random) -> str:
    return facts_document(rng, countries={})


def _recall(rng: random.Random) -> str:
    keys = {subject: make_key(rng, held_out=True) for subject in subjects(rng, 1)}
    text, answer = passage(rng, lambda: story(rng), rng.randrange(MAX_DISTANCE_CHARS), keys)
    return text + answer


def _chat(rng: random.Random) -> str:
    messages, tools, _ = conversation(rng)
    return chat_renderer().render(messages=messages, tools=tools)


_DOCUMENTS: dict[str, Callable[[random.Random], str]] = {
    "story": story,
    "facts": _facts,
    "recall": _recall,
    "chat": _chat,
}
