"""Sampling parameters through the offline LLM, on a model whose logits are a table."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from deltaserve.engine import LLM, SamplingParams

from .bigram_model import write_bigram_model
from .bigram_server import TABLE, Z
from .tiny_checkpoint import IM_END_ID


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llm")
    return write_bigram_model(path, TABLE, {"top_k": 1, "repetition_penalty": 1.3})


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    with LLM(str(directory), device="cpu", max_num_seqs=4, max_model_len=256) as llm:
        yield llm


def test_prompts_without_parameters_get_the_checkpoints_defaults(llm: LLM) -> None:
    assert llm.default_params == SamplingParams(top_k=1, repetition_penalty=1.3)
    [completion] = llm.generate("a")
    assert (completion.text, completion.stop_reason) == ("bcz", IM_END_ID)


def test_the_checkpoints_defaults_can_be_left_alone(directory: Path) -> None:
    options = {"device": "cpu", "max_num_seqs": 1, "max_model_len": 256}
    with LLM(str(directory), generation_config="none", **options) as llm:
        assert llm.default_params == SamplingParams()


def test_parameters_of_each_prompt(llm: LLM) -> None:
    """All in the same steps, each on its own row."""
    greedy = {"temperature": 0.0, "max_tokens": 5}
    words = llm.tokenizer.bad_words(["bc"])
    cases: list[tuple[SamplingParams, str]] = [
        (SamplingParams(**greedy), "bcabc"),
        (SamplingParams(**greedy, bad_words=words), "bzzzz"),
        (SamplingParams(**greedy, presence_penalty=2.0), "bcaz"),
        (SamplingParams(**greedy, logit_bias=((Z, 2.0),)), "zzzzz"),
        (SamplingParams(**greedy, stop=("ca",), include_stop_str_in_output=True), "bca"),
        (SamplingParams(**greedy, stop=("c",), min_tokens=3), "bcab"),
        (SamplingParams(**greedy, stop_token_ids=(Z,), presence_penalty=2.0), "bca"),
    ]
    completions = llm.generate(["a"] * len(cases), [params for params, _ in cases])
    assert [completion.text for completion in completions] == [text for _, text in cases]
