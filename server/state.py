"""ServerState: what all routes of one application share, built before it and given to it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from deltaserve.engine.async_engine import AsyncEngine
from deltaserve.engine.tokenizer import Tokenizer


@dataclass
class ServerState:
    """`served_names`: the first is canonical. `tokenizer` is set once it has been read, and
    `sampling_defaults` with it: SamplingParams' fields that a request leaves out."""

    engine: AsyncEngine
    served_names: tuple[str, ...]
    created: int
    max_body_bytes: int
    tokenizer: Tokenizer | None = None
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)

    @property
    def unavailable(self) -> str | None:
        """Why no request can be answered now, or None."""
        if self.engine.unavailable is None and self.tokenizer is None:
            return "the model is loading: reading the tokenizer"
        return self.engine.unavailable
