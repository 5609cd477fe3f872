"""Grammars: a client's grammar -> a matcher over the model's vocabulary, beside the engine.

Owns the threads that compile and what has been compiled lately. A grammar is compiled twice: in a
process that it may bring down (`grammar_check`), then here, without the GIL.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from queue import LifoQueue

from .grammar import Grammar, GrammarError
from .grammar_check import compile_grammar
from .grammar_checker import GrammarChecker
from .grammar_state import CompiledFuture, CompiledGrammar
from .grammar_vocabulary import GrammarVocabulary
from .request_queue import QueueFullError
from .tokenizer import Tokenizer

logger = logging.getLogger(__name__)

NUM_THREADS = 2
MAX_COMPILED = 256
MAX_COMPILED_BYTES = 1 << 29
MAX_WAITING = 256
"""Different grammars that wait to be compiled."""

_Key = tuple[str, str]


class Grammars:
    """`compile` may be called from the engine's thread alone. Nothing is read or started before
    the first grammar, or `load`."""

    def __init__(self, tokenizer: Tokenizer, end_ids: frozenset[int], vocab_size: int) -> None:
        """`end_ids` may come where a grammar may end; masks are for ids below `vocab_size`."""
        self._vocabulary = GrammarVocabulary(tokenizer, end_ids, vocab_size)
        self._threads = ThreadPoolExecutor(NUM_THREADS, "grammar")
        self._checkers = tuple(GrammarChecker(self._vocabulary) for _ in range(NUM_THREADS))
        self._free_checkers: LifoQueue[GrammarChecker] = LifoQueue()
        for checker in self._checkers:
            self._free_checkers.put(checker)
        self._compiled: OrderedDict[_Key, CompiledFuture] = OrderedDict()

    def load(self) -> None:
        """Reads the vocabulary in a thread."""
        self._threads.submit(lambda: self._vocabulary.tokenizer)

    def compile(self, grammar: Grammar) -> CompiledFuture:
        """Its exception is a GrammarError, or a QueueFullError where a process or memory could not
        be had. Equal grammars share one, unless that failed or was cancelled. Raises
        QueueFullError."""
        key = grammar.kind, grammar.text
        known = self._compiled.get(key)
        if known is not None and not _is_void(known):
            self._compiled.move_to_end(key)
            return known
        if sum(not future.done() for future in self._compiled.values()) >= MAX_WAITING:
            raise QueueFullError(f"{MAX_WAITING} grammars wait to be compiled; try again later")
        future = self._compiled[key] = self._threads.submit(self._compile, grammar)
        self._compiled.move_to_end(key)
        self._forget_old()
        return future

    def close(self) -> None:
        """Ends threads and processes, whatever they are at. Idempotent."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for checker in self._checkers:
            checker.kill()
        self._threads.shutdown(wait=True)
        for checker in self._checkers:
            checker.close()

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        try:
            return self._check_and_compile(grammar)
        except GrammarError:
            raise
        except (OSError, MemoryError) as error:
            logger.exception("no grammar can be compiled now")
            raise QueueFullError("no grammar can be compiled now; try again later") from error
        except BaseException as error:  # a panic of llguidance is no Exception
            logger.exception("a grammar cannot be compiled")
            raise GrammarError(grammar, "cannot be compiled") from error

    def _check_and_compile(self, grammar: Grammar) -> CompiledGrammar:
        vocabulary = self._vocabulary
        if not vocabulary.end_ids:
            raise GrammarError(grammar, "the model has no end id for the output to end with")
        checker = self._free_checkers.get()
        try:
            text, num_bytes = checker.check(grammar)
        finally:
            self._free_checkers.put(checker)
        try:
            matcher = compile_grammar(vocabulary.tokenizer, text)
        except ValueError as error:
            raise GrammarError(grammar, str(error)) from None
        return CompiledGrammar(matcher, vocabulary.end_ids, vocabulary.newline_ids, num_bytes)

    def _forget_old(self) -> None:
        """The least recently used first; those on their way stay."""
        total = 0
        for number, (key, future) in enumerate(reversed(list(self._compiled.items()))):
            if not future.done():
                continue
            if not _is_void(future) and future.exception() is None:
                total += future.result().num_bytes
            if number >= MAX_COMPILED or total > MAX_COMPILED_BYTES or _is_void(future):
                del self._compiled[key]


def _is_void(future: CompiledFuture) -> bool:
    """Whether it says nothing about its grammar."""
    return future.cancelled() or (future.done() and isinstance(future.exception(), QueueFullError))
