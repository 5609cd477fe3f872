"""ServerState: what all routes of one application share, built before it and given to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deltaserve.engine.async_engine import AsyncEngine
from deltaserve.engine.tokenizer import Tokenizer

from .chat_template import ChatTemplate
from .options import ServerOptions


@dataclass
class ServerState:
    """`tokenizer` is set once it has been read, and `sampling_defaults` with it: SamplingParams'
    fields that a request leaves out, and `chat_template`, which a model need not have. `created`:
    seconds since the epoch."""

    engine: AsyncEngine
    options: ServerOptions
    created: int
    tokenizer: Tokenizer | None = None
    chat_template: ChatTemplate | None = None
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    others_ready: bool = True
    """Whether the other workers of this address, if any, have once been ready too."""

    @property
    def served_names(self) -> tuple[str, ...]:
        """The first is canonical."""
        return self.options.served_names

    @property
    def max_body_bytes(self) -> int:
        return self.options.max_body_bytes

    @property
    def unavailable(self) -> str | None:
        """Why no request can be answered now, or None."""
        if self.engine.unavailable is None and self.tokenizer is None:
            return "the model is loading: reading the tokenizer"
        return self.engine.unavailable

    @property
    def not_ready(self) -> str | None:
        """Why a request might not be answered, by whichever worker it reaches, or None."""
        if self.unavailable is None and not self.others_ready:
            return "the model is loading: other workers"
        return self.unavailable
