"""Progress: how whoever loads a model says how far it is."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]
"""Called with (stage, done, total), in bytes for weights; total 0 where a stage has no measure."""
