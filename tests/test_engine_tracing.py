"""The ranges that a profiler sees: names, nesting, and that results do not change."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from deltaserve.engine.config import ModelConfig
from deltaserve.engine.dummy_weights import dummy_weights
from deltaserve.engine.model_loader import create_backend, create_model_runner
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.sequence import Sequence
from tests.tiny_engine import engine_config, write_tiny_model
from tools.engine_timings import run_requests


class PathTracer:
    """The path of every range that began, in order."""

    def __init__(self) -> None:
        self.open: list[str] = []
        self.paths: list[str] = []

    def begin(self, name: str, args: tuple[Any, ...]) -> None:
        self.open.append(name)
        self.paths.append("/".join(self.open))

    def end(self) -> None:
        self.open.pop()


def run(directory: Path, tracer: PathTracer | None, prompt_len: int = 150) -> list[int]:
    config = ModelConfig.from_hf(directory)
    backend = create_backend(engine_config(directory), config)
    weights = dummy_weights(config, backend.device, backend.act_dtype)
    backend = dataclasses.replace(backend, tracer=tracer)
    runner = create_model_runner(config, backend, weights, vocab_limit=200)
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    sequence = Sequence("a", (7,) * prompt_len, params)
    run_requests(runner, [sequence])
    runner.close()
    return list(sequence.output_ids)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def test_every_op_lies_in_its_layer_pass_and_step(model: Path) -> None:
    tracer = PathTracer()
    run(model, tracer)
    assert tracer.open == []
    paths = set(tracer.paths)
    assert {
        "step/prefill/embed",
        "step/prefill/layer 0/causal_conv1d",
        "step/prefill/layer 0/linear_silu_mul",
        "step/prefill/layer 1/attention_prefill",
        "step/prefill/lm_head",
        "step/decode/prepare_decode",
        "step/decode/layer 0/delta_net_decode",
        "step/decode/layer 1/attention_decode",
        "step/decode/layer 1/linear_partials",
        "step/decode/lm_head",
        "step/sample",
    } <= paths
    assert not any("layer 0/attention" in p or "layer 1/delta" in p for p in paths)
    assert tracer.paths.count("step/decode/layer 0") == 2


def test_tracing_changes_no_token(model: Path) -> None:
    assert run(model, PathTracer()) == run(model, None)


def test_a_pass_that_ends_within_the_layers_closes_its_range(model: Path) -> None:
    tracer = PathTracer()
    run(model, tracer, prompt_len=300)  # in two steps, the first of which wants no logits
    assert tracer.open == []
    assert tracer.paths.count("step/prefill/layer 1") == 2
    assert tracer.paths.count("step/prefill/lm_head") == 1
    assert set(tracer.paths) >= {"step", "step/prefill"}
