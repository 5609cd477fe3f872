"""Compares a checkpoint, as the engine computes it, with what transformers computed from it.

    python -m tools.verify_checkpoint --model-path DIR --fixture FILE [FILE ...] [--device auto]

Runs each prompt of a fixture and then its tokens one by one, as decode steps, and prints the gate
of tools/golden_gate.py for every prompt and for the file. Exits with 0 if every file passes, 1 if
not, 2 if they cannot be compared. Needs the checkpoint's config.json and weights, no tokenizer and
no torch. On the CPU it computes in fp32.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tools.gpu_check import make_importable

make_importable()

from deltaserve.engine.config import ModelConfig  # noqa: E402
from deltaserve.engine.ops.cuda.detect import has_usable_gpu  # noqa: E402
from deltaserve.engine.weights import load_weights  # noqa: E402
from tools.engine_model import BLOCK_SIZE, EngineModel, Parts, cpu_parts, cuda_parts  # noqa: E402
from tools.golden_gate import (  # noqa: E402
    MAX_MEAN,
    MAX_P99,
    MAX_REGRET,
    Fixture,
    Gate,
    GoldenSequence,
    compare,
    gate,
    read_fixture,
)

PREFILL_TOKENS = 32 * BLOCK_SIZE


def check_match(fixture: Fixture, model_dir: Path, config: ModelConfig, any_config: bool) -> None:
    """ValueError where the fixture cannot be of this model, or was made from another config."""
    if fixture.max_id >= config.vocab_size:
        raise ValueError(
            f"{fixture.path}: has token {fixture.max_id}, but the vocabulary of {model_dir} ends at"
            f" {config.vocab_size - 1}"
        )
    if fixture.longest > config.max_position_embeddings:
        raise ValueError(
            f"{fixture.path}: has {fixture.longest} tokens in a row, {model_dir} is for"
            f" {config.max_position_embeddings}"
        )
    expected = fixture.metadata.get("config_sha256")
    found = hashlib.sha256((model_dir / "config.json").read_bytes()).hexdigest()
    if expected not in (None, found) and not any_config:
        model = fixture.metadata.get("model", "another model")
        raise ValueError(
            f"{fixture.path}: was made from {model}, whose config.json has sha256 {expected};"
            f" {model_dir}/config.json has {found} (--any-config compares them all the same)"
        )


class Logits:
    """A model that gives the rows of golden sequences."""

    def __init__(self, model_dir: Path, config: ModelConfig, parts: Parts, longest: int) -> None:
        weights = load_weights(model_dir, config, parts.device, parts.act_dtype)
        self._model = EngineModel(config, weights, parts, longest)
        self._device = parts.device

    def of(self, sequence: GoldenSequence) -> npt.NDArray[np.float32]:
        """[1 + len(decode_ids), vocab]: after the prompt, and after each token fed then."""
        ids = sequence.prompt_ids
        starts = range(0, len(ids), PREFILL_TOKENS)
        for start in starts:
            end = min(start + PREFILL_TOKENS, len(ids))
            last = self._model.prefill(0, ids, start, end, [end - start - 1])
        rows = [self._on_host(last)]
        for i, token in enumerate(sequence.decode_ids):
            rows.append(self._on_host(self._model.decode([(0, token, len(ids) + i)])))
        return np.concatenate(rows)

    def _on_host(self, logits: Any) -> npt.NDArray[np.float32]:
        out = self._device.host_empty(logits.shape, "float32")
        self._device.submit(lambda: self._device.download(logits, out)).wait()
        return np.array(out)


def line(first: str, found: Gate) -> str:
    cells = f"{found.mean:9.4f} {found.p99:9.4f} {found.regret:9.4f} {found.same_argmax:10.1%}"
    return f"{first:>10} {cells}{'' if found.passed else '  over the limit'}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", type=Path, required=True, metavar="DIR")
    parser.add_argument("--fixture", type=Path, nargs="+", required=True, metavar="FILE")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--any-config", action="store_true", help="whatever config.json the fixture was made from"
    )
    options = parser.parse_args(arguments)
    model_dir = options.model_path
    try:
        config = ModelConfig.from_hf(model_dir)
        fixtures = [read_fixture(path) for path in options.fixture]
        for fixture in fixtures:
            check_match(fixture, model_dir, config, options.any_config)
        longest = max(fixture.longest for fixture in fixtures)
        on_gpu = options.device == "cuda" or (options.device == "auto" and has_usable_gpu())
        tokens = min(PREFILL_TOKENS, -(-longest // BLOCK_SIZE) * BLOCK_SIZE)
        if on_gpu and not has_usable_gpu():
            raise ValueError("--device cuda: no NVIDIA GPU, or no CuPy")
        parts = cuda_parts(config, 1, tokens) if on_gpu else cpu_parts(1, tokens, round_bf16=False)
        began = time.monotonic()
        logits = Logits(model_dir, config, parts, longest)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{model_dir} on {parts.device.name}: loaded in {time.monotonic() - began:.1f} s")
    passed = True
    for fixture in fixtures:
        print(f"\n{fixture.path.name} ({fixture.metadata.get('model', 'no model named')})")
        print(f"{'prompt':>10} {'mean |d|':>9} {'p99 |d|':>9} {'regret':>9} {'same argmax':>11}")
        rows = []
        for sequence in fixture.sequences:
            rows.append(compare(logits.of(sequence), sequence))
            print(line(str(len(sequence.prompt_ids)), gate(rows[-1:])), flush=True)
        whole = gate(rows)
        print(line("all", whole))
        print(f"{'limit':>10} {MAX_MEAN:9.4f} {MAX_P99:9.4f} {MAX_REGRET:9.4f}")
        print("passed" if whole.passed else "FAILED")
        passed = passed and whole.passed
    parts.device.close()
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
