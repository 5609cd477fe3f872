"""Sampling defaults of a checkpoint: what generation_config.json says where a request says nothing.

Its end ids are read with the model's configuration (`ModelConfig.from_hf`). `do_sample` has no
effect, as in vLLM: a temperature of 0 is what asks for greedy decoding.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .json_section import CheckpointError, read_json_object
from .sampling_params import SamplingParams

_FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def read_sampling_defaults(model_path: str | Path) -> dict[str, Any]:
    """SamplingParams' fields by name; none where the checkpoint has no generation_config.json.

    CheckpointError for values that SamplingParams refuses.
    """
    path = Path(model_path) / "generation_config.json"
    if not path.exists():
        return {}
    values = read_json_object(path)
    defaults = {name: values[name] for name in _FIELDS if values.get(name) is not None}
    try:
        SamplingParams(**defaults)
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return defaults
