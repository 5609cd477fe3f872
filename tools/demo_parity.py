"""The demo model through the engine on a device, against the NumPy ops with bf16 rounding, which are
fed the same tokens, and against itself with other batches and chunks.

Two kinds of text. Whole held-out documents are prefilled, and the device's first choice is looked at
behind each of their tokens. Of 20 stories, facts and recall passages every first choice is NumPy's,
or within NEAR of it. Prompts are continued greedily, by the decode kernels; there, and in chat,
the candidates may also be as far apart as bf16 rounding alone moves them.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from deltaserve.engine.config import ModelConfig
from deltaserve.engine.llm import LLM, Completion
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.weights import load_weights
from tools.demo_texts import PROMPTS, held_out
from tools.engine_model import EngineModel, cpu_parts

F32 = npt.NDArray[np.float32]

NUM_TOKENS = 32
NEAR = 0.05
"""Logits that two candidates may differ by and count as equal."""
NEAR_DOCUMENTS = {"story": 7, "facts": 7, "recall": 6}
NOISY_DOCUMENTS = {"chat": 5}
"""Apart from the others for one tie that its user turns often begin with: after a tool's result
"Look" is before "Open" by 0.050 with bf16 rounding and by 0.017 without."""

RUNS: tuple[dict[str, int], ...] = (
    {"max_num_seqs": 1},
    {"max_num_seqs": 3, "max_num_batched_tokens": 128, "prefill_chunk": 64},
    {"max_num_seqs": 8, "max_num_batched_tokens": 256, "prefill_chunk": 128},
)
"""Beside all texts at once."""

_GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=5, ignore_eos=True)
_SAMPLED = SamplingParams(max_tokens=NUM_TOKENS, seed=7, top_p=0.9, logprobs=5, ignore_eos=True)
_FED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, ignore_eos=True)


@dataclass(frozen=True)
class Fed:
    """Tokens that were fed, and the device's first choice behind each from `first` on."""

    ids: list[int]
    chosen: list[int]
    first: int = 0


class NumpyModel:
    """The NumPy ops, one text at a time."""

    def __init__(self, model_dir: Path, *, round_bf16: bool) -> None:
        self._parts = cpu_parts(1, 512, round_bf16=round_bf16)
        config = ModelConfig.from_hf(model_dir)
        weights = load_weights(model_dir, config, self._parts.device, "float32", round_bf16=True)
        self._model = EngineModel(config, weights, self._parts, 1024)

    def logits(self, fed: Fed) -> F32:
        """Behind each token from `fed.first` on, [len(fed.chosen), vocab]."""
        found = []
        for start in range(0, len(fed.ids), self._parts.max_tokens):
            end = min(start + self._parts.max_tokens, len(fed.ids))
            rows = range(max(fed.first - start, 0), end - start)
            found.append(self._model.prefill(0, fed.ids, start, end, rows or [0])[: len(rows)])
        return np.concatenate(found)

    def close(self) -> None:
        self._parts.device.close()


def generate(
    model_dir: Path, device: str, documents: SequenceOf[str], **options: Any
) -> tuple[list[list[int]], list[Completion]]:
    """(ids of the prompts and documents, completions): of the prompts the greedy ones, then of the
    documents, then of the prompts the sampled ones."""
    dtype = "bfloat16" if device == "cpu" else "auto"
    defaults: dict[str, Any] = {"max_model_len": 1024, "kv_cache_memory": 256 << 20}
    with LLM(str(model_dir), device=device, dtype=dtype, **{**defaults, **options}) as llm:
        ids = [llm.tokenizer.encode(text) for text in (*PROMPTS, *documents)]
        prompts = ids[: len(PROMPTS)]
        params = [_GREEDY] * len(prompts) + [_FED] * len(documents) + [_SAMPLED] * len(prompts)
        return ids, llm.generate(ids + prompts, params)


def demo_checks(model_dir: Path, device: str, release: Any) -> Iterator[dict[str, Any]]:
    """Rows with `ok`. `release()` gives memory of closed engines back to the device."""
    kinds = NEAR_DOCUMENTS | NOISY_DOCUMENTS
    documents = [text for kind, count in kinds.items() for text in held_out(kind, count)]
    ids, base = generate(model_dir, device, documents, max_num_seqs=2 * len(PROMPTS))
    gc.collect()
    release()
    rounded = NumpyModel(model_dir, round_bf16=True)
    exact = NumpyModel(model_dir, round_bf16=False)

    done = len(PROMPTS)
    for kind, count in kinds.items():
        of_kind = slice(done, done + count)
        done += count
        fed = list(map(fed_document, ids[of_kind], base[of_kind]))
        measured = [gaps(each, rounded, exact) for each in fed]
        yield row_of(
            f"fed {count} documents: {kind}", measured, noise_counts=kind not in NEAR_DOCUMENTS
        )
    for text, prompt, completion in zip(PROMPTS, ids, base, strict=False):
        measured = [gaps(fed_completion(prompt, completion), rounded, exact)]
        what = f"greedy {text[:30]!r} -> {completion.text[:40]!r}"
        yield row_of(what, measured, noise_counts=True)
    rounded.close()
    exact.close()

    for options in RUNS:
        _, again = generate(model_dir, device, documents, **options)
        gc.collect()
        release()
        differing = sum(a != b for a, b in zip(base, again, strict=True))
        yield {"what": f"equal bits with {options}", "differing": differing, "ok": differing == 0}


def fed_document(ids: list[int], completion: Completion) -> Fed:
    """Behind all but the last token by its log-probabilities, behind the last by what follows."""
    chosen = [entry.top_ids[0] for entry in completion.prompt_logprobs]
    return Fed(ids, [*chosen, *completion.token_ids])


def fed_completion(prompt: list[int], completion: Completion) -> Fed:
    taken = list(completion.token_ids)
    return Fed([*prompt, *taken[:-1]], taken, len(prompt) - 1)


def gaps(fed: Fed, rounded: NumpyModel, exact: NumpyModel) -> tuple[F32, F32]:
    """By how much the best of the rounded logits is over the device's choice, and how much of that
    rounding itself can make: the difference of the two ids' distance with and without it, twice,
    since both sides round. Both one a choice."""
    rounded_logits, exact_logits = rounded.logits(fed), exact.logits(fed)
    rows, best = np.arange(len(fed.chosen)), rounded_logits.argmax(-1)
    behind = rounded_logits[rows, best] - rounded_logits[rows, fed.chosen]
    behind_exact = exact_logits[rows, best] - exact_logits[rows, fed.chosen]
    return behind, 2 * np.abs(behind - behind_exact)


def row_of(
    what: str, measured: SequenceOf[tuple[F32, F32]], *, noise_counts: bool
) -> dict[str, Any]:
    """Of texts' `gaps`. Without `noise_counts` no candidates may be further apart than NEAR."""
    behind, noise = (np.concatenate(parts) for parts in zip(*measured, strict=True))
    allowed = np.maximum(NEAR, noise) if noise_counts else NEAR
    return {
        "what": what,
        "positions": len(behind),
        "other_argmax": int((behind > 0).sum()),
        "over_0.05": int((behind > NEAR).sum()),
        "largest_gap": float(behind.max()),
        "its_noise": float(noise[behind.argmax()]),
        "ok": bool((behind <= allowed).all()),
    }
