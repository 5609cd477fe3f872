"""tools/verify_checkpoint.py on a small checkpoint, with fixtures made by the straight-line
reference; the real ones have the same form."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.reference_qwen3_5 import ReferenceModel
from tests.slow_packing import read_tensors
from tests.tiny_checkpoint import tiny_hf_config, write_checkpoint
from tools.golden_gate import GoldenSequence, compare, gate
from tools.verify_checkpoint import main

LENGTHS, STEPS, TOP = (70, 1, 5), 3, 64


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint")
    write_checkpoint(directory, seed=4, nested=False)
    return directory


@pytest.fixture(scope="module")
def tensors(checkpoint: Path) -> dict[str, np.ndarray]:
    reference = ReferenceModel(tiny_hf_config(), read_tensors(checkpoint))
    rng = np.random.default_rng(8)
    prompts = [rng.integers(0, 320, length).tolist() for length in LENGTHS]
    decode = rng.integers(0, 320, (len(LENGTHS), STEPS))
    rows = np.stack(
        [
            reference.logits([*prompt, *steps])[len(prompt) - 1 :]
            for prompt, steps in zip(prompts, decode.tolist(), strict=True)
        ]
    )
    logprobs = rows - np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    ids = np.argsort(-logprobs, axis=-1)[..., :TOP]
    return {
        "prompt_tokens": np.concatenate(prompts).astype(np.int32),
        "prompt_lens": np.array(LENGTHS, np.int32),
        "decode_tokens": decode.astype(np.int32),
        "topk_ids": ids.astype(np.int32),
        "topk_logprobs": np.take_along_axis(logprobs, ids, axis=-1).astype(np.float32),
    }


def write(
    path: Path, tensors: dict[str, np.ndarray], checkpoint: Path, **changes: np.ndarray
) -> Path:
    sha256 = hashlib.sha256((checkpoint / "config.json").read_bytes()).hexdigest()
    metadata = {"model": "Tiny-0.0001B", "config_sha256": sha256}
    save_file({**tensors, **changes}, path, metadata)
    return path


def verify(checkpoint: Path, *fixtures: Path, options: tuple[str, ...] = ()) -> int:
    files = [str(path) for path in fixtures]
    return main(["--model-path", str(checkpoint), "--device", "cpu", *options, "--fixture", *files])


def test_the_right_model_passes(
    checkpoint: Path,
    tensors: dict[str, np.ndarray],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With prompts in pieces: the longest takes two."""
    monkeypatch.setattr("tools.verify_checkpoint.PREFILL_TOKENS", 64)
    assert verify(checkpoint, write(tmp_path / "golden", tensors, checkpoint)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines[4:7]] == ["70", "1", "5"]
    assert lines[7][0] == "all" and float(lines[7][1]) < 0.001 and lines[7][4] == "100.0%"
    assert lines[-1] == ["passed"]


def test_other_weights_fail(tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
    write_checkpoint(tmp_path, seed=5, nested=False)
    assert verify(tmp_path, write(tmp_path / "golden", tensors, tmp_path)) == 1


def test_one_of_two_files_that_differs_fails(
    checkpoint: Path,
    tensors: dict[str, np.ndarray],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = write(tmp_path / "right", tensors, checkpoint)
    changed = tensors["topk_logprobs"].copy()
    changed[1] -= 0.25
    wrong = write(tmp_path / "wrong", tensors, checkpoint, topk_logprobs=changed)
    assert verify(checkpoint, wrong, right) == 1
    verdicts = [x for x in capsys.readouterr().out.splitlines() if x in ("passed", "FAILED")]
    assert verdicts == ["FAILED", "passed"]


def test_a_fixture_of_another_config_is_refused_unless_asked_for(
    checkpoint: Path,
    tensors: dict[str, np.ndarray],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "config.json").write_text("{}")
    fixture = write(tmp_path / "golden", tensors, tmp_path)
    assert verify(checkpoint, fixture) == 2
    error = capsys.readouterr().err
    assert "golden: was made from Tiny-0.0001B, whose config.json has sha256" in error
    assert verify(checkpoint, fixture, options=("--any-config",)) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["topk_ids"].__setitem__((0, 0, 0), 320), "token 320, but .* ends at 319"),
        (lambda t: t.update(prompt_lens=t["prompt_lens"] + 1), "do not fit together"),
        (lambda t: t["topk_logprobs"].fill(np.nan), "do not fit together"),
        (lambda t: t.pop("decode_tokens"), "no tensor decode_tokens"),
        (lambda t: t.update(topk_ids=t["topk_ids"][0]), r"topk_ids: .* 3 axes, found int32 \[4, 6"),
    ],
)
def test_fixtures_that_do_not_fit(
    checkpoint: Path,
    tensors: dict[str, np.ndarray],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    change: Any,
    message: str,
) -> None:
    changed = {name: array.copy() for name, array in tensors.items()}
    change(changed)
    assert verify(checkpoint, write(tmp_path / "golden", changed, checkpoint)) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {tmp_path / 'golden'}: ")
    assert re.search(message, error)


def test_a_file_that_is_no_fixture(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "golden").write_text("hello")
    assert verify(checkpoint, tmp_path / "golden") == 2
    assert verify(checkpoint, tmp_path / "none") == 2
    assert verify(checkpoint, *checkpoint.glob("*.safetensors")) == 2
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 3 and "no tensor decode_tokens" in errors[2]


def sequence(logprobs: list[float]) -> GoldenSequence:
    return GoldenSequence([1], [], np.array([[7, 3]], np.int32), np.array([logprobs], np.float32))


def logits_of(**values: float) -> np.ndarray:
    logits = np.full((1, 10), -30.0, np.float32)
    for name, value in values.items():
        logits[0, int(name[1:])] = value
    return logits


def test_regret_is_what_the_reference_loses_by_our_choice() -> None:
    near = sequence([-0.6, -0.9])
    assert compare(logits_of(_7=1.0), near).regrets.tolist() == [0.0]
    assert compare(logits_of(_3=1.0), near).regrets == pytest.approx(0.3)
    assert compare(logits_of(_5=1.0), near).regrets.tolist() == [np.inf]
    assert compare(logits_of(_3=1.0), sequence([-0.7, -0.7])).regrets.tolist() == [0.0]


def test_logits_that_are_not_numbers_pass_nothing() -> None:
    row = compare(np.full((1, 10), np.nan, np.float32), sequence([-0.6, -0.9]))
    assert not gate([row]).passed
