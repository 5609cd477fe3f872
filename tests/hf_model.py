"""A case run by transformers on CPU torch. Imported by what needs torch anyway."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import DynamicCache, Qwen3_5ForCausalLM

from tests.model_cases import DECODE_START, DECODE_STEPS, Trace


def load(directory: Path, dtype: torch.dtype = torch.float32) -> Qwen3_5ForCausalLM:
    torch.set_num_threads(1)  # on shared cores, more take many times as long
    return Qwen3_5ForCausalLM.from_pretrained(directory, dtype=dtype).eval()


@torch.no_grad()
def hf_trace(model: Qwen3_5ForCausalLM, ids: list[int]) -> Trace:
    prefill = model(torch.tensor([ids]), use_cache=False).logits[0]
    cache = DynamicCache(config=model.config)
    model(torch.tensor([ids[:DECODE_START]]), past_key_values=cache)
    end = DECODE_START + DECODE_STEPS
    decode = [
        model(torch.tensor([[ids[p]]]), past_key_values=cache).logits[0]
        for p in range(DECODE_START, end)
    ]
    return Trace(_numpy(prefill), _numpy(torch.cat(decode)), _states(cache))


def _states(cache: DynamicCache) -> dict[str, np.ndarray]:
    states: dict[str, np.ndarray] = {}
    for index, layer in enumerate(cache.layers):
        if hasattr(layer, "recurrent_states"):
            states[f"{index}.recurrent"] = _numpy(layer.recurrent_states[0][0])
            states[f"{index}.conv"] = _numpy(layer.conv_states[0][0].T[-3:])
        else:
            states[f"{index}.k"] = _numpy(layer.keys[0])
            states[f"{index}.v"] = _numpy(layer.values[0])
    return states


def _numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.float().numpy().copy()
