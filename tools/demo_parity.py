"""The demo model through the engine on a device: its greedy texts against the NumPy ops with bf16
rounding, fed the same tokens, and against themselves with other batches and chunks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deltaserve.engine.config import ModelConfig
from deltaserve.engine.llm import LLM, Completion
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.weights import load_weights
from tools.engine_model import EngineModel, cpu_parts

NUM_TOKENS = 32
NEAR = 0.05
"""Logits that two candidates may differ by and count as equal; more where bf16 rounding alone moves
them further, as it does where the model knows no next word."""

PROMPTS = (
    "The capital of France is",
    "The capital of Japan is",
    "Once upon a time",
    "Water boils at",
    "The sun",
    "A",
    "1, 2, 3, 4,",
    "def main():",
    "The largest planet is",
    "In the morning the farmer",
    "She opened the door and",
    "What is the capital of Italy?",
    "The colour of the sky is",
    "There was a little dog who",
    "Two plus two is",
    "The river ran",
    "A story about a bear: ",
    "Yes",
    "The key is 7. " * 20 + "The key is",
    "Once there was a girl. She had a red ball. " * 30,
)
RUNS: tuple[dict[str, int], ...] = (
    {"max_num_seqs": 1},
    {"max_num_seqs": 3, "max_num_batched_tokens": 128, "prefill_chunk": 64},
    {"max_num_seqs": 8, "max_num_batched_tokens": 256, "prefill_chunk": 128},
)
"""Beside all prompts at once."""

_SAMPLED = SamplingParams(max_tokens=NUM_TOKENS, seed=7, top_p=0.9, logprobs=5, ignore_eos=True)
_GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=5, ignore_eos=True)


def generate(model_dir: Path, device: str, **options: Any) -> tuple[list[list[int]], list[Any]]:
    """(prompt ids, completions): the greedy ones, then the sampled ones."""
    dtype = "bfloat16" if device == "cpu" else "auto"
    defaults: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory": 256 << 20}
    with LLM(str(model_dir), device=device, dtype=dtype, **{**defaults, **options}) as llm:
        prompts = [llm.tokenizer.encode(text) for text in PROMPTS]
        params = [_GREEDY] * len(prompts) + [_SAMPLED] * len(prompts)
        return prompts, llm.generate(prompts * 2, params)


def demo_checks(model_dir: Path, device: str, release: Any) -> Iterator[dict[str, Any]]:
    """Rows with `ok`. `release()` gives memory of closed engines back to the device."""
    prompts, base = generate(model_dir, device, max_num_seqs=len(PROMPTS) * 2)
    gc.collect()
    release()
    greedy = base[: len(PROMPTS)]
    taken = np.array([completion.token_ids for completion in greedy])
    behind, noise = gaps(
        taken,
        numpy_logits(model_dir, prompts, greedy, round_bf16=True),
        numpy_logits(model_dir, prompts, greedy, round_bf16=False),
    )
    for row, (text, completion) in enumerate(zip(PROMPTS, greedy, strict=True)):
        near = behind[row] <= np.maximum(NEAR, noise[row])
        yield {
            "what": f"greedy {text[:30]!r} -> {completion.text[:40]!r}",
            "other_argmax": int((behind[row] > 0).sum()),
            "over_0.05": int((behind[row] > NEAR).sum()),
            "largest_gap": float(behind[row].max()),
            "its_noise": float(noise[row][behind[row].argmax()]),
            "ok": completion.error is None and bool(near.all()),
        }
    for options in RUNS:
        _, again = generate(model_dir, device, **options)
        gc.collect()
        release()
        differing = sum(
            (a.token_ids, a.logprobs) != (b.token_ids, b.logprobs)
            for a, b in zip(base, again, strict=True)
        )
        yield {"what": f"equal bits with {options}", "differing": differing, "ok": differing == 0}


def numpy_logits(
    model_dir: Path,
    prompts: list[list[int]],
    completions: list[Completion],
    *,
    round_bf16: bool,
) -> npt.NDArray[np.float32]:
    """What the NumPy ops say where the completions' tokens were taken, [prompts, tokens, vocab]."""
    parts = cpu_parts(len(prompts), 512, round_bf16=round_bf16)
    config = ModelConfig.from_hf(model_dir)
    weights = load_weights(model_dir, config, parts.device, "float32", round_bf16=True)
    model = EngineModel(config, weights, parts, 1024)
    found = np.empty((len(prompts), NUM_TOKENS, config.vocab_size), np.float32)
    for slot, ids in enumerate(prompts):
        for start in range(0, len(ids), parts.max_tokens):
            end = min(start + parts.max_tokens, len(ids))
            found[slot, 0] = model.prefill(slot, ids, start, end, [end - start - 1])[0]
    for step in range(NUM_TOKENS - 1):
        rows = [
            (slot, completions[slot].token_ids[step], len(ids) + step)
            for slot, ids in enumerate(prompts)
        ]
        found[:, step + 1] = model.decode(rows)
    parts.device.close()
    return found


def gaps(
    taken: npt.NDArray[np.int64],
    rounded: npt.NDArray[np.float32],
    exact: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """By how much the best of the rounded logits is over the token taken, and how much of that
    rounding itself can make: the difference of the two ids' distance with and without it, twice,
    since both sides round. taken [P, T], logits [P, T, vocab]; both results [P, T]."""

    def behind(logits: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        best = np.take_along_axis(logits, rounded.argmax(-1)[..., None], -1)[..., 0]
        return best - np.take_along_axis(logits, taken[..., None], -1)[..., 0]

    return behind(rounded), 2 * np.abs(behind(rounded) - behind(exact))
