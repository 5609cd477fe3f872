"""ServerState: what all routes of one application share, built before it and given to it."""

from __future__ import annotations

from dataclasses import dataclass

from deltaserve.engine.async_engine import AsyncEngine
from deltaserve.engine.tokenizer import Tokenizer


@dataclass
class ServerState:
    """`served_names`: the first is canonical. `tokenizer` is set once it has been read."""

    engine: AsyncEngine
    served_names: tuple[str, ...]
    created: int
    max_body_bytes: int
    tokenizer: Tokenizer | None = None

    @property
    def unavailable(self) -> str | None:
        """Why no request can be answered now, or None."""
        if self.engine.unavailable is None and self.tokenizer is None:
            return "the model is loading: reading the tokenizer"
        return self.engine.unavailable
