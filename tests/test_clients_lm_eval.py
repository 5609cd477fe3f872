"""lm-eval's `local-completions` against a server on a model whose logits are a table: it has no
tokenizer of its own, and its numbers are those of the table."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .bigram_server import LOGPROBS, start_bigram
from .server_process import ServerProcess
from .tiny_checkpoint import IM_END_ID

for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):  # read when its libraries are imported
    os.environ.setdefault(name, "1")
lm_eval = pytest.importorskip("lm_eval")
pytestmark = pytest.mark.clients

# question, answers; the first is right
CHOICES = [("a", ["bc", "za", "b"]), ("abz", ["zz", "a", "e"]), ("e", ["f", "e", "fe"])]
# question, stop string, what comes before it
GENERATIONS = [("a", "ca", "b"), ("z", "x", "zzzzz"), ("e", "x", "")]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    started = start_bigram(tmp_path_factory.mktemp("lm_eval"))
    yield started
    started.stop()


@pytest.fixture
def model_args(server: ServerProcess) -> dict[str, Any]:
    return {
        "base_url": server.url + "/v1/completions",
        "model": "m",
        "tokenizer_backend": "remote",
        "max_length": 256,
        "num_concurrent": 2,
    }


def evaluate(
    model_args: dict[str, Any],
    documents: list[dict[str, Any]],
    directory: Path,
    patch: pytest.MonkeyPatch,
    **task: Any,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(metrics, samples) of a task over `documents`."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks import TaskManager

    directory.mkdir(exist_ok=True)
    patch.setattr("datasets.config.HF_DATASETS_CACHE", directory / "hf")
    (directory / "documents.json").write_text("\n".join(map(json.dumps, documents)))
    config = {
        "task": "table",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(directory / "documents.json")}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "target_delimiter": "",
        **task,
    }
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args=model_args,
        tasks=[ConfigurableTask(config=config)],
        task_manager=TaskManager(include_defaults=False),  # its own are thousands
        bootstrap_iters=0,
    )
    samples = sorted(results["samples"]["table"], key=lambda sample: sample["doc_id"])
    return results["results"]["table"], samples


def loglikelihood(question: str, answer: str) -> float:
    ids = (question[-1] + answer).encode()
    return float(sum(LOGPROBS[pair] for pair in itertools.pairwise(ids)))


@pytest.mark.parametrize("tokenized_requests", [True, False], ids=["ids", "text"])
def test_loglikelihood(
    model_args: dict[str, Any],
    tokenized_requests: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    documents = [{"question": q, "answers": answers, "gold": 0} for q, answers in CHOICES]
    metrics, samples = evaluate(
        model_args | {"tokenized_requests": tokenized_requests},
        documents,
        tmp_path,
        monkeypatch,
        output_type="multiple_choice",
        doc_to_choice="answers",
        doc_to_target="gold",
    )
    for (question, answers), sample in zip(CHOICES, samples, strict=True):
        found = [float(response[0][0]) for response in sample["resps"]]
        expected = [loglikelihood(question, answer) for answer in answers]
        assert found == pytest.approx(expected, abs=1e-4)
    best = [
        max(range(len(answers)), key=lambda i: loglikelihood(question, answers[i]))
        for question, answers in CHOICES
    ]
    assert metrics["acc,none"] == pytest.approx(best.count(0) / len(best))


def test_generation(
    model_args: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (question, stop, answer) in enumerate(GENERATIONS):
        metrics, (sample,) = evaluate(
            model_args,
            [{"question": question, "answer": answer}],
            tmp_path / str(number),
            monkeypatch,
            output_type="generate_until",
            doc_to_target="answer",
            generation_kwargs={"until": [stop], "max_gen_toks": 5, "do_sample": False},
            metric_list=[{"metric": "exact_match"}],
        )
        assert sample["resps"] == [[answer]]
        assert metrics["exact_match,none"] == 1.0


def test_rolling_loglikelihood(model_args: dict[str, Any]) -> None:
    """Of a whole text, begun with the tokenizer's end token."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.openai_completions import LocalCompletionsAPI

    model = LocalCompletionsAPI(**model_args)
    (found,) = model.loglikelihood_rolling(
        [Instance("loglikelihood_rolling", {}, ("abcabzz",), 0)], disable_tqdm=True
    )
    ids = [IM_END_ID, *b"abcabzz"]
    assert found == pytest.approx(sum(LOGPROBS[p] for p in itertools.pairwise(ids)), abs=1e-4)
