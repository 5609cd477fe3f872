"""The inference engine: model, caches, scheduler, backends. It knows nothing of HTTP.

`LLM`, `Completion` and `SamplingParams` are loaded on first use, so that importing this package
(and the parts of it that an HTTP worker needs) loads neither NumPy nor a model.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .llm import LLM as LLM
    from .llm import Completion as Completion
    from .sampling_params import SamplingParams as SamplingParams

__all__ = ["LLM", "Completion", "SamplingParams"]

_MODULES = {"LLM": "llm", "Completion": "llm", "SamplingParams": "sampling_params"}


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{module}", __name__), name)
