"""The demo model's endless training stream: a mixture of documents, tokenised and packed.

`python -m tools.demo_corpus SOURCES.json.gz FOLDER` trains the tokenizer and writes it there.
"""

import gzip
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from tokenizers import Tokenizer

from tools.demo_chat import conversation
from tools.demo_checkpoint import CHAT_TEMPLATE, ENDOFTEXT, train_tokenizer, write_tokenizer
from tools.demo_facts import facts_document, gloss_document
from tools.demo_recall import recall_document
from tools.demo_stories import story

# documents of each kind; tokens: stories 1/3, recall and chat 1/4 each, the rest 1/6
WEIGHTS = {"story": 1.7, "recall": 0.45, "chat": 0.9, "facts": 0.9, "prose": 0.2, "gloss": 0.3}
MAX_PENDING = 48


def load_sources(path: str | Path) -> dict[str, Any]:
    with gzip.open(path, "rt", encoding="utf-8") as handle:
        sources: dict[str, Any] = json.load(handle)
    return sources


def chat_renderer() -> jinja2.Template:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    return environment.from_string(CHAT_TEMPLATE)


class Corpus:
    """Draws documents at random; each worker of the stream has one with its own seed."""

    def __init__(self, sources: dict[str, Any], seed: int) -> None:
        self.rng = random.Random(seed)
        self.sources = sources
        self.template = chat_renderer()

    def prose(self) -> str:
        run: str = self.rng.choice(self.sources["prose"])
        paragraphs = run.split("\n\n")
        return "\n\n".join(paragraphs[self.rng.randrange(len(paragraphs)) :])

    def filler(self) -> str:
        kind = self.rng.random()
        if kind < 0.65:
            return story(self.rng)
        if kind < 0.8:
            return self.prose()[:1200]
        return facts_document(self.rng, self.sources["countries"])

    def chat(self) -> str:
        messages, tools, _ = conversation(self.rng)
        return self.template.render(messages=messages, tools=tools)

    def document(self) -> str:
        kind = self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if kind == "story":
            return story(self.rng)
        if kind == "recall":
            return recall_document(self.rng, self.filler)
        if kind == "chat":
            return self.chat()
        if kind == "facts":
            return facts_document(self.rng, self.sources["countries"])
        if kind == "prose":
            return self.prose()
        return gloss_document(self.rng, self.sources["glosses"])


def rows(corpus: Corpus, tokenizer: Tokenizer, length: int) -> Iterator[np.ndarray]:
    """Endless rows of `length` ids (uint16). A row begins with a document and holds whole ones,
    each followed by <|endoftext|>; only its last may be cut."""
    pending: list[list[int]] = []
    while True:
        row: list[int] = []
        while len(row) < length:
            if len(pending) < MAX_PENDING // 2:
                texts = [corpus.document() for _ in range(MAX_PENDING)]
                pending += [[*e.ids, ENDOFTEXT] for e in tokenizer.encode_batch(texts)]
            free = length - len(row)
            fitting = (i for i in range(len(pending)) if len(pending[i]) <= free)
            row += pending.pop(next(fitting, 0))[:free]
        yield np.array(row, dtype=np.uint16)


def main(sources_path: str, folder: str) -> None:
    sources = load_sources(sources_path)
    corpus = Corpus(sources, seed=0)
    texts = [corpus.document() for _ in range(12000)] + sources["prose"][::2]
    write_tokenizer(Path(folder), train_tokenizer(iter(texts)))


if __name__ == "__main__":
    main(*sys.argv[1:3])
