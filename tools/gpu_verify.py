"""Sends a model of random weights through the disk: transformers writes its checkpoint and a
fixture of its log-probabilities, which tools/verify_checkpoint.py compares with the engine's.

    python -m tools.gpu_verify [--size 4B] [--folder /dev/shm] [--out FILE]

A second fixture, with one prompt's log-probabilities changed, must fail. Needs torch and
transformers, and room for the checkpoint in --folder. Exits with 1 if a check fails.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tools.golden_gate import TOP
from tools.gpu_check import make_importable
from tools.model_shapes import SIZES, hf_text_config

LENGTHS = (1, 7, 64, 300, 2049)
SEED = 20261201
CHANGE = 0.5
"""More than the gate lets a log-probability differ."""


def write_model(folder: Path, size: str, device: str, lengths: tuple[int, ...]) -> dict[str, Any]:
    """The checkpoint in `folder`, and the tensors of a fixture of it."""
    import torch

    from tools.hf_parity import DECODE_STEPS, random_model, reference_logits

    config = hf_text_config(size)
    model = random_model(config, device, SEED)
    model.save_pretrained(folder)
    rng = np.random.default_rng(SEED)
    tokens = [rng.integers(0, config["vocab_size"], n + DECODE_STEPS).tolist() for n in lengths]
    rows = [
        reference_logits(model, ids, n)[-1 - DECODE_STEPS :].log_softmax(-1).topk(TOP)
        for ids, n in zip(tokens, lengths, strict=True)
    ]
    prompts = [ids[:n] for ids, n in zip(tokens, lengths, strict=True)]
    return {
        "prompt_tokens": np.concatenate(prompts).astype(np.int32),
        "prompt_lens": np.array(lengths, np.int32),
        "decode_tokens": np.array([ids[-DECODE_STEPS:] for ids in tokens], np.int32),
        "topk_ids": torch.stack([row.indices for row in rows]).int().cpu().numpy(),
        "topk_logprobs": torch.stack([row.values for row in rows]).float().cpu().numpy(),
    }


def verify(folder: Path, fixture: Path, device: str) -> tuple[int, list[str]]:
    """verify_checkpoint's exit status and what it prints."""
    from tools.verify_checkpoint import main as verify_checkpoint

    words = ["--model-path", str(folder), "--device", device, "--fixture", str(fixture)]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        status = verify_checkpoint(words)
    return status, printed.getvalue().replace(f"{folder}/", "").splitlines()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="4B")
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", type=Path, help="for the checkpoint, which is removed again")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(arguments)
    make_importable()
    from tools.gpu_model_check import free_memory

    checks: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        folder = Path(place)
        tensors = write_model(folder, options.size, options.device, tuple(options.lengths))
        free_memory()
        sha256 = hashlib.sha256((folder / "config.json").read_bytes()).hexdigest()
        changed = tensors["topk_logprobs"].copy()
        changed[-1] -= CHANGE
        for name, values, expected in (
            ("right", tensors, 0),
            ("changed", tensors | {"topk_logprobs": changed}, 1),
        ):
            fixture = folder / f"{name}.fixture"
            save_file(values, fixture, {"model": options.size, "config_sha256": sha256})
            status, lines = verify(folder, fixture, options.device)
            checks[name] = {"status": status, "ok": status == expected, "printed": lines}
            print("\n".join(lines), flush=True)
            free_memory()
    passed = all(check["ok"] for check in checks.values())
    if options.out:
        options.out.write_text(json.dumps({"size": options.size, "checks": checks}) + "\n")
    print("all checks passed" if passed else "FAILED")
    return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
