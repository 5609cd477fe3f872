"""The gate that a model's log-probabilities must pass, and the files of them from transformers.

A fixture (safetensors, of the openinfer project) has n prompts, each with the tokens that were fed
after it one by one, and the K likeliest next tokens after the prompt and after each of those:

    prompt_tokens int32 [sum of prompt_lens]     prompt_lens int32 [n]
    decode_tokens int32 [n, steps]
    topk_ids int32, topk_logprobs fp32 [n, 1 + steps, K]     likeliest first

Needs NumPy and safetensors alone. Running a model is `verify_checkpoint`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, safe_open

TOP = 64
MAX_MEAN, MAX_P99, MAX_REGRET = 0.06, 0.20, 0.20

_TENSORS = {
    "prompt_tokens": ("int32", 1),
    "prompt_lens": ("int32", 1),
    "decode_tokens": ("int32", 2),
    "topk_ids": ("int32", 3),
    "topk_logprobs": ("float32", 3),
}


@dataclass(frozen=True)
class GoldenSequence:
    """`decode_ids` follow the prompt; `top_ids` and `top_logprobs` [1 + len(decode_ids), K]."""

    prompt_ids: list[int]
    decode_ids: list[int]
    top_ids: npt.NDArray[np.int32]
    top_logprobs: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Fixture:
    path: Path
    metadata: dict[str, str]
    sequences: tuple[GoldenSequence, ...]

    @property
    def longest(self) -> int:
        return max(len(s.prompt_ids) + len(s.decode_ids) for s in self.sequences)

    @property
    def max_id(self) -> int:
        return max(max(*s.prompt_ids, *s.decode_ids, int(s.top_ids.max())) for s in self.sequences)


def read_fixture(path: Path) -> Fixture:
    """Raises ValueError that names the file and what is wrong with it."""
    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            missing = sorted(_TENSORS.keys() - set(file.keys()))
            if missing:
                raise ValueError(f"{path}: not a golden fixture: no tensor {missing[0]}")
            arrays = {name: file.get_tensor(name) for name in _TENSORS}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: cannot be read: {error}") from error
    for name, (dtype, rank) in _TENSORS.items():
        found = arrays[name]
        if found.dtype.name != dtype or found.ndim != rank:
            raise ValueError(
                f"{path}: {name}: expected {dtype} of {rank} axes, found {found.dtype.name}"
                f" {list(found.shape)}"
            )
    lens, decode = arrays["prompt_lens"], arrays["decode_tokens"]
    top_ids, top_logprobs = arrays["topk_ids"], arrays["topk_logprobs"]
    rows = (len(lens), 1 + decode.shape[1])
    if (
        len(lens) == 0
        or lens.min() < 1
        or lens.sum() != len(arrays["prompt_tokens"])
        or len(decode) != len(lens)
        or top_ids.shape != top_logprobs.shape
        or top_ids.shape[:2] != rows
        or top_ids.shape[2] < 1
        or min(arrays["prompt_tokens"].min(), decode.min(), top_ids.min()) < 0
        or not np.isfinite(top_logprobs).all()
    ):
        raise ValueError(f"{path}: its tensors do not fit together")
    ends = np.cumsum(lens)
    return Fixture(
        path,
        metadata,
        tuple(
            GoldenSequence(
                arrays["prompt_tokens"][end - length : end].tolist(),
                decode[i].tolist(),
                top_ids[i],
                top_logprobs[i],
            )
            for i, (end, length) in enumerate(zip(ends, lens, strict=True))
        ),
    )


@dataclass(frozen=True)
class Gate:
    """Over some rows: mean and 99th percentile of |d log-probability| at the reference's likeliest
    ids, and regret, the worst over the rows: what the reference's log-probability loses by our
    argmax in the place of its own."""

    mean: float
    p99: float
    regret: float
    same_argmax: float

    @property
    def passed(self) -> bool:
        return self.mean <= MAX_MEAN and self.p99 <= MAX_P99 and self.regret <= MAX_REGRET


@dataclass(frozen=True)
class Rows:
    """The rows of one sequence against the reference: differences [n, K], regrets [n]."""

    differences: npt.NDArray[np.float64]
    regrets: npt.NDArray[np.float64]


def compare(logits: npt.NDArray[np.float32], sequence: GoldenSequence) -> Rows:
    """`logits` [1 + len(decode_ids), vocab]. The regret is infinite where our argmax is not among
    the reference's ids, and NaN logits differ by NaN, which passes no gate."""
    logits = logits.astype(np.float64)
    highest = logits.max(axis=1, keepdims=True)
    logprobs = logits - highest - np.log(np.exp(logits - highest).sum(axis=1, keepdims=True))
    ours = np.take_along_axis(logprobs, sequence.top_ids.astype(np.int64), axis=1)
    is_choice = sequence.top_ids == logits.argmax(axis=1)[:, None]
    reference = sequence.top_logprobs.astype(np.float64)
    chosen = np.where(is_choice, reference, -math.inf).max(axis=1)
    return Rows(np.abs(ours - reference), reference.max(axis=1) - chosen)


def gate(rows: list[Rows]) -> Gate:
    differences = np.concatenate([r.differences.ravel() for r in rows])
    regrets = np.concatenate([r.regrets for r in rows])
    return Gate(
        mean=float(differences.mean()),
        p99=float(np.quantile(differences, 0.99)),
        regret=float(regrets.max()),
        same_argmax=float((regrets == 0).mean()),
    )
