"""A real engine that fails in its N-th step, as a CUDA error makes one fail."""

from __future__ import annotations

from typing import Any

from deltaserve.engine.llm_engine import LLMEngine
from deltaserve.engine.progress import Progress

CRASH_STEP = 30


def build_crashing_engine(config: Any, progress: Progress) -> LLMEngine:
    """For EngineProcess: reading step CRASH_STEP raises, while the next one is under way."""
    engine = LLMEngine(config, progress=progress)
    submit = engine._runner.submit
    num_steps = 0

    def failing(batch: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        step = submit(batch)
        if num_steps == CRASH_STEP:
            step.wait = _raise  # type: ignore[method-assign]
        return step

    engine._runner.submit = failing  # type: ignore[method-assign]
    return engine


def _raise() -> Any:
    raise RuntimeError("an illegal memory access was encountered")
