"""What a streamed completion held: token counts, times and a hash of the output.

Reads the bytes that `bench_client` kept. Knows the events of OpenAI's completions and vLLM's
`token_ids` beside the text.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tools.bench_client import Answer

_HASH_DIGITS = 16


@dataclass
class Outcome:
    """One request. Times in ms; `gaps` between the events that brought tokens."""

    ttft: float = 0.0
    e2e: float = 0.0
    gaps: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    finish_reason: str | None = None
    output_hash: str = ""
    hash_of: str = "text"
    error: str | None = None

    @property
    def tpot(self) -> float | None:
        """None where there is no second token."""
        if self.output_tokens < 2:
            return None
        return (self.e2e - self.ttft) / (self.output_tokens - 1)


def read_outcome(answer: Answer) -> Outcome:
    """`e2e` ends at the last event with tokens, not at the usage event or [DONE] behind it."""
    outcome = Outcome(error=answer.error)
    if outcome.error is None and answer.status != 200:
        outcome.error = f"{answer.status}: {_message(answer.body)}"
    if outcome.error is not None:
        return outcome
    try:
        _read_events(answer, outcome)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        outcome.error = f"an event that is no completion: {type(error).__name__}: {error}"
    if outcome.error is None and outcome.finish_reason is None:
        outcome.error = "the stream ended without a finish_reason"
    return outcome


def _read_events(answer: Answer, outcome: Outcome) -> None:
    times: list[float] = []
    texts: list[str] = []
    token_ids: list[int] = []
    any_ids = False
    last = answer.started
    for now, data in _events(answer):
        if data == b"[DONE]":
            continue
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            outcome.error = str(event["error"].get("message", event["error"]))
            return
        usage = event.get("usage")
        if usage:
            outcome.prompt_tokens = usage["prompt_tokens"]
            outcome.output_tokens = usage["completion_tokens"]
        for choice in event["choices"]:
            ids = choice.get("token_ids")
            any_ids = any_ids or ids is not None
            if choice["text"] or ids:
                texts.append(choice["text"])
                token_ids += ids or ()
                times.append(now)
            if choice.get("finish_reason"):
                outcome.finish_reason = choice["finish_reason"]
            last = now
    first = times[0] if times else last
    outcome.ttft = 1e3 * (first - answer.started)
    outcome.e2e = 1e3 * (last - answer.started)
    outcome.gaps = [1e3 * (b - a) for a, b in itertools.pairwise(times)]
    outcome.hash_of = "token ids" if any_ids else "text"
    content = json.dumps(token_ids) if any_ids else "".join(texts)
    outcome.output_hash = hashlib.sha256(content.encode()).hexdigest()[:_HASH_DIGITS]


def _events(answer: Answer) -> Iterator[tuple[float, bytes]]:
    """(time of its last byte, data) of each server-sent event."""
    unread = b""
    for now, piece in answer.pieces:
        *events, unread = (unread + piece).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                yield now, b"\n".join(lines)


def _message(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return body[:200].decode(errors="replace")
