"""A grammar that the output of a request must follow, as it travels to the engine's process.

Owns its kinds and limits. Whether the text is one at all is known when it is compiled: `grammars`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

KINDS = ("json_schema", "regex", "choice", "lark", "grammar")
MAX_GRAMMAR_CHARS = 1 << 18
MAX_CHOICES = 10_000
MAX_START_IDS = 16
JSON_WHITESPACE = r"\x20|\r?\n[\x20\t]{0,48}"
"""Between the tokens of JSON, at most: a blank, or a line break and indentation. Of any number a
model could go on with them for ever."""


class GrammarError(ValueError):
    """The grammar is none, or too much of one; `field` names what the client called it."""

    def __init__(self, grammar: Grammar, problem: str) -> None:
        super().__init__(f"{grammar.field}: {problem}")
        self.field = grammar.field
        self.problem = problem


@dataclass(frozen=True)
class Grammar:
    """`text` by `kind`: a JSON schema; a regular expression for the whole output; a JSON list of
    strings to choose from; Lark in llguidance's dialect; `grammar`: Lark or GBNF, whichever it is.

    `start_after`: token ids after which it begins to hold, such as the end of reasoning; until
    they have come the output is free, but must not end. One token of newlines may follow them.
    `field` is what messages call it, no part of the grammar.
    """

    kind: str
    text: str
    start_after: tuple[int, ...] = ()
    field: str = field(default="grammar", compare=False)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"grammar: the kinds are {', '.join(KINDS)}, got {self.kind!r:.100}")
        if not isinstance(self.text, str) or not self.text:
            raise GrammarError(self, "must be a string, and not empty")
        if len(self.text) > MAX_GRAMMAR_CHARS:
            raise GrammarError(
                self, f"at most {MAX_GRAMMAR_CHARS} characters, got {len(self.text)}"
            )
        if len(self.start_after) > MAX_START_IDS:
            raise GrammarError(self, f"may start after at most {MAX_START_IDS} ids")
