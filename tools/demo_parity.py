"""The demo model through the engine on a device, against the NumPy ops with bf16 rounding, fed the
same tokens, and against itself with other batches and chunks.

Two kinds of text. Whole held-out documents are prefilled, and the device's first choice is looked
at behind each of their tokens: of 20 stories, facts and recall passages every choice is NumPy's, or
within NEAR of it. Prompts are continued greedily, by the decode kernels; there, and in chat, the
candidates may also be as far apart as bf16 rounding alone moves them.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as SequenceOf
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
I64 = npt.NDArray[np.int64]

NUM_TOKENS = 32
MAX_LEN = 1024
NEAR = 0.05
"""Logits that two candidates may differ by and count as equal."""
NEAR_DOCUMENTS = {"story": 7, "facts": 7, "recall": 6}
"""The first so many of each kind; of these no candidates may be further apart."""
NOISY_DOCUMENTS = {"chat": 5}
"""Not among those for what its users say: of two openings of a turn, "Look" and "Open", the first
is likelier by 0.0504 with bf16 rounding and by 0.017 without, so the order of sums decides."""

RUNS: tuple[dict[str, int], ...] = (
    {"max_num_seqs": 1},
    {"max_num_seqs": 3, "max_num_batched_tokens": 128, "prefill_chunk": 64},
    {"max_num_seqs": 8, "max_num_batched_tokens": 256, "prefill_chunk": 128},
)
"""Beside all texts at once."""

_GREEDY = SamplingParams(max_tokens=NUM_TOKENS, temperature=0.0, logprobs=5, ignore_eos=True)
_SAMPLED = SamplingParams(max_tokens=NUM_TOKENS, seed=7, top_p=0.9, logprobs=5, ignore_eos=True)
_FED = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=1, ignore_eos=True)


class NumpyModel:
    """The NumPy ops over some slots; documents use the first."""

    def __init__(self, model_dir: Path, slots: int, *, round_bf16: bool) -> None:
        self._parts = cpu_parts(slots, 512, round_bf16=round_bf16)
        config = ModelConfig.from_hf(model_dir)
        weights = load_weights(model_dir, config, self._parts.device, "float32", round_bf16=True)
        self._vocab_size = config.vocab_size
        self._model = EngineModel(config, weights, self._parts, MAX_LEN)

    def document_logits(self, ids: list[int]) -> F32:
        """Behind each token, [tokens, vocab]."""
        return np.concatenate(list(self._prefill(0, ids, all_rows=True)))

    def completion_logits(self, prompts: SequenceOf[list[int]], taken: I64) -> F32:
        """Where the tokens `taken` [prompts, tokens] were taken, [prompts, tokens, vocab]."""
        found = np.empty((*taken.shape, self._vocab_size), np.float32)
        for slot, ids in enumerate(prompts):
            for logits in self._prefill(slot, ids, all_rows=False):
                found[slot, 0] = logits[-1]
        for step in range(taken.shape[1] - 1):
            rows = [
                (slot, int(taken[slot, step]), len(ids) + step) for slot, ids in enumerate(prompts)
            ]
            found[:, step + 1] = self._model.decode(rows)
        return found

    def close(self) -> None:
        self._parts.device.close()

    def _prefill(self, slot: int, ids: list[int], *, all_rows: bool) -> Iterator[F32]:
        """Logits of each chunk's rows, or of its last row."""
        for start in range(0, len(ids), self._parts.max_tokens):
            end = min(start + self._parts.max_tokens, len(ids))
            rows = range(0 if all_rows else end - start - 1, end - start)
            yield self._model.prefill(slot, ids, start, end, rows)


def generate(
    model_dir: Path,
    device: str,
    prompts: SequenceOf[str],
    documents: SequenceOf[str],
    **options: int,
) -> tuple[list[list[int]], list[Completion]]:
    """(ids of prompts and documents, completions): the prompts' greedy ones, the documents' of one
    token, the prompts' sampled ones."""
    defaults: dict[str, Any] = {
        "device": device,
        "dtype": "bfloat16" if device == "cpu" else "auto",
        "max_model_len": MAX_LEN,
        "kv_cache_memory": 256 << 20,
    }
    with LLM(str(model_dir), **{**defaults, **options}) as llm:
        ids = [llm.tokenizer.encode(text) for text in (*prompts, *documents)]
        params = [_GREEDY] * len(prompts) + [_FED] * len(documents) + [_SAMPLED] * len(prompts)
        completions = llm.generate(ids + ids[: len(prompts)], params)
    if errors := {completion.error for completion in completions} - {None}:
        raise RuntimeError(f"the engine failed: {errors}")
    return ids, completions


def demo_checks(
    model_dir: Path,
    device: str,
    release: Callable[[], None],
    *,
    prompts: SequenceOf[str] = PROMPTS,
    near: Mapping[str, int] = NEAR_DOCUMENTS,
    noisy: Mapping[str, int] = NOISY_DOCUMENTS,
    runs: SequenceOf[dict[str, int]] = RUNS,
) -> Iterator[dict[str, Any]]:
    """Rows with `ok`. `release()` gives memory of closed engines back to the device."""
    kinds = [*near.items(), *noisy.items()]
    documents = [text for kind, count in kinds for text in held_out(kind, count)]
    ids, base = generate(model_dir, device, prompts, documents, max_num_seqs=2 * len(prompts))
    gc.collect()
    release()
    rounded = NumpyModel(model_dir, len(prompts), round_bf16=True)
    exact = NumpyModel(model_dir, len(prompts), round_bf16=False)

    behind, noise = [], []
    for each, completion in zip(ids[len(prompts) :], base[len(prompts) :], strict=False):
        logits = rounded.document_logits(each), exact.document_logits(each)
        found = gaps(first_choices(completion), *logits)
        behind.append(found[0])
        noise.append(found[1])
    for kind, count in kinds:
        of_kind = np.concatenate(behind[:count]), np.concatenate(noise[:count])
        del behind[:count], noise[:count]
        what = f"fed {count} documents: {kind}"
        yield {"what": what, **compared(*of_kind, noise_counts=kind not in near)}

    greedy = base[: len(prompts)]
    taken = np.array([completion.token_ids for completion in greedy])
    all_logits = [m.completion_logits(ids[: len(prompts)], taken) for m in (rounded, exact)]
    for text, completion, tokens, *both in zip(prompts, greedy, taken, *all_logits, strict=True):
        what = f"greedy {text[:30]!r} -> {completion.text[:40]!r}"
        yield {"what": what, **compared(*gaps(tokens, *both), noise_counts=True)}
    rounded.close()
    exact.close()

    for options in runs:
        _, again = generate(model_dir, device, prompts, documents, **options)
        gc.collect()
        release()
        differing = sum(a != b for a, b in zip(base, again, strict=True))
        yield {"what": f"equal bits with {options}", "differing": differing, "ok": differing == 0}


def first_choices(completion: Completion) -> I64:
    """Of a document that was fed: behind all tokens but the last from the log-probabilities of
    those that follow, behind the last the token that was made."""
    chosen = [entry.top_ids[0] for entry in completion.prompt_logprobs]
    return np.array([*chosen, *completion.token_ids])


def gaps(taken: I64, rounded: F32, exact: F32) -> tuple[F32, F32]:
    """By how much the best of the rounded logits is over the token taken, and how much of that
    rounding itself can make: the difference of the two ids' distance with and without it, twice,
    since both sides round. taken [T], logits [T, vocab]; both results [T]."""
    assert len(taken) == len(rounded) == len(exact), "one choice a position"
    rows, best = np.arange(len(taken)), rounded.argmax(-1)
    behind = rounded[rows, best] - rounded[rows, taken]
    behind_exact = exact[rows, best] - exact[rows, taken]
    return behind, 2 * np.abs(behind - behind_exact)


def compared(behind: F32, noise: F32, *, noise_counts: bool) -> dict[str, Any]:
    """Without `noise_counts` no two candidates may be further apart than NEAR."""
    allowed = np.maximum(NEAR, noise) if noise_counts else NEAR
    return {
        "positions": len(behind),
        "other_argmax": int((behind > 0).sum()),
        "over_0.05": int((behind > NEAR).sum()),
        "largest_gap": float(behind.max()),
        "its_noise": float(noise[behind.argmax()]),
        "ok": bool((behind <= allowed).all()),
    }
