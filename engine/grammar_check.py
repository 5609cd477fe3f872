"""A process of its own in which a client's grammar is compiled for the first time.

What it sends may be anything: nested until a stack overflows, a regular expression of a million
states, a conversion that never ends. Here that costs a process, which the engine starts again; what
compiles here compiles in the engine too, whose limits are the same or wider (`COMPILE_LIMITS`).
Only vocabulary differs: here it is single bytes and the added tokens, whose ids a grammar may name.

    python -m deltaserve.engine.grammar_check
    stdin:   one line of JSON, {"size", "tokens": {id: hex}, "special": [id], "end": [id]}; then a
             line {"kind", "text"} for each grammar
    stdout:  a line for each grammar: {"grammar": what llguidance reads, "bytes": memory it took}
             or {"error"}. The process ends when stdin does, or at a limit.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from llguidance.gbnf_to_lark import any_to_lark

from .grammar import JSON_WHITESPACE, MAX_CHOICES

CPU_SECONDS = 2.0
MAX_ADDRESS_SPACE = 1 << 30
MAX_STACK = 4 << 20
"""Half of what a thread of the engine has."""
MAX_ERROR_CHARS = 500

COMPILE_LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "max_grammar_size": 250_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 50_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "verbose_errors": False,
}
"""Of compiling and of each mask: at most tens of milliseconds of the latter."""


def parser_limits() -> LLParserLimits:
    return LLParserLimits(**COMPILE_LIMITS)


def llguidance_grammar(kind: str, text: str) -> str:
    """A `Grammar` in the form that llguidance reads. ValueError for what it cannot be."""
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(
            text, defaults={"whitespace_pattern": JSON_WHITESPACE}
        )
    if kind == "regex":
        return LLMatcher.grammar_from_regex(text)
    if kind == "choice":
        choices = json.loads(text)
        if not choices or len(choices) > MAX_CHOICES or "" in choices:
            raise ValueError(f"there must be 1 to {MAX_CHOICES} choices, none of them empty")
        texts = " | ".join(map(json.dumps, choices))  # in one terminal, which may have any number
        return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {texts}")
    return LLMatcher.grammar_from_lark(any_to_lark(text) if kind == "grammar" else text)


def compile_grammar(tokenizer: LLTokenizer, grammar: str) -> LLMatcher:
    """A matcher that has computed its first mask. ValueError for what does not compile."""
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        problem = _one_line(matcher.get_error())
        raise ValueError("no output follows it" if "NoExtension" in problem else problem)
    return matcher


def make_tokenizer(
    tokens: list[bytes], special: list[int], end: list[int], encode: Any
) -> LLTokenizer:
    """`tokens` by id, b"" where there is none. `encode`: text to ids, of text that is forced."""
    wrapper: Any = type("Vocabulary", (), {"__call__": lambda self, text: encode(text)})()
    wrapper.tokens = tokens
    wrapper.special_token_ids = special
    wrapper.eos_token_id = end[0]
    wrapper.bos_token_id = None
    return LLTokenizer(TokenizerWrapper(wrapper), eos_token=end)


def _small_tokenizer(line: bytes) -> LLTokenizer:
    vocabulary = json.loads(line)
    tokens = [b""] * vocabulary["size"]
    for token_id, token in vocabulary["tokens"].items():
        tokens[int(token_id)] = bytes.fromhex(token)
    byte_ids = {token[0]: i for i, token in enumerate(tokens) if len(token) == 1}
    special, end = vocabulary["special"], vocabulary["end"]

    def encode(text: str | bytes) -> list[int]:
        data = text.encode() if isinstance(text, str) else text
        return [byte_ids[byte] for byte in data if byte in byte_ids]

    return make_tokenizer(tokens, special, end, encode)


def _answer(tokenizer: LLTokenizer, request: dict[str, str]) -> dict[str, Any]:
    before = _resident_bytes()
    try:
        grammar = llguidance_grammar(request["kind"], request["text"])
        matcher = compile_grammar(tokenizer, grammar)
    except Exception as error:  # the conversion of GBNF raises its own
        return {"error": _one_line(str(error))}
    taken = _resident_bytes() - before
    del matcher
    return {"grammar": grammar, "bytes": max(taken, 0)}


def _one_line(message: str) -> str:
    """Without most of the grammar's own text, which may be all of one long word."""
    words = (word if len(word) <= 80 else word[:40] + "..." for word in message.split())
    return " ".join(words)[:MAX_ERROR_CHARS]


def _resident_bytes() -> int:
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_SPACE, MAX_ADDRESS_SPACE))
    resource.setrlimit(resource.RLIMIT_STACK, (MAX_STACK, MAX_STACK))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = _small_tokenizer(sys.stdin.buffer.readline())
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        answer = _answer(tokenizer, json.loads(line))
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
