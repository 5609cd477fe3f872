"""Log-probabilities of prompt tokens: right, once, and of equal bits however the prompt is cut."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deltaserve.engine.llm import LLM
from deltaserve.engine.llm_engine import LLMEngine
from deltaserve.engine.ops.numpy.sampling import log_normalizer, top_ids
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.scheduled_batch import ScheduledDecode
from deltaserve.engine.sequence import FinishReason, RequestOutput, TokenLogprobs
from deltaserve.engine.step_passes import Work
from tests.tiny_checkpoint import NUM_TOKENS
from tests.tiny_engine import (
    assert_idle,
    engine_config,
    run_to_end,
    token_ids,
    write_tiny_model,
)

ECHO = SamplingParams(max_tokens=0, prompt_logprobs=3)
Entries = tuple[TokenLogprobs, ...]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(directory: Path) -> Iterator[LLMEngine]:
    engine = LLMEngine(engine_config(directory))
    yield engine
    engine.close()


def random_prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(NUM_TOKENS) for _ in range(length)]


def prompt_logprobs(outputs: list[RequestOutput]) -> Entries:
    """All of a request, which come with its first output."""
    assert all(output.prompt_logprobs == () for output in outputs[1:])
    return outputs[0].prompt_logprobs


def of_alone(directory: Path, prompts: list[list[int]]) -> list[Entries]:
    """In one chunk, one at a time, in slices of one row of logits."""
    config = engine_config(directory, max_num_seqs=1, max_num_batched_tokens=1024)
    engine = LLMEngine(config)
    entries = []
    for prompt in prompts:
        engine.add_request("a", prompt, ECHO)
        entries.append(prompt_logprobs(run_to_end(engine)["a"]))
    engine.close()
    return entries


def test_they_are_those_of_the_logits_behind_each_prefix(directory: Path) -> None:
    """The logits row from which the next token of each prefix is sampled, as its own request.

    A prefix that ends inside the 64-token grid is another matrix product: equal to rounding only.
    """
    prompt = random_prompt(70)
    rows: dict[int, np.ndarray] = {}
    engine = LLMEngine(
        engine_config(directory),
        logits_hook=lambda _, position, row: rows.update({position: row.copy()}),
    )
    for length in range(1, len(prompt)):
        engine.add_request(str(length), prompt[:length], SamplingParams(max_tokens=1))
        run_to_end(engine)
    engine.add_request("whole", prompt, ECHO)
    (output,) = run_to_end(engine)["whole"]
    limit = engine.vocab_limit
    engine.close()

    assert (output.token_ids, output.finish_reason) == ((), FinishReason.LENGTH)
    assert len(output.prompt_logprobs) == len(prompt) - 1
    for position, entry in enumerate(output.prompt_logprobs, 1):
        row, target = rows[position][:limit], prompt[position]
        largest, log_total = log_normalizer(row)
        top = top_ids(row, 3)
        expected = [float((row[i] - largest) - log_total) for i in (target, *top)]
        if position == 64:
            assert [entry.logprob, *entry.top_logprobs] == expected
        np.testing.assert_allclose([entry.logprob, *entry.top_logprobs], expected, atol=2e-5)
        assert entry.rank == np.sum(row >= row[target])
        assert entry.top_ids == tuple(top.tolist())


@pytest.mark.parametrize("budgets", [(64, 64), (128, 64), (256, 128)])
def test_bits_do_not_depend_on_chunks_slices_and_batch(
    directory: Path, budgets: tuple[int, int]
) -> None:
    lengths = [1, 2, 63, 64, 65, 129, 300]
    prompts = [random_prompt(length, length) for length in lengths]
    expected = of_alone(directory, prompts)
    batched, chunk = budgets
    engine = LLMEngine(
        engine_config(directory, max_num_batched_tokens=batched, prefill_chunk=chunk)
    )
    decoding = SamplingParams(max_tokens=60, ignore_eos=True, seed=1)
    engine.add_request("decoding", [3, 4], decoding)
    engine.step()
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, ECHO)
    outputs = run_to_end(engine)
    assert_idle(engine)
    assert [prompt_logprobs(outputs[str(i)]) for i in range(len(prompts))] == expected
    engine.add_request("alone", [3, 4], decoding)
    assert token_ids(run_to_end(engine)["alone"]) == token_ids(outputs["decoding"])
    engine.close()


def test_padding_of_a_decode_graph_does_not_reach_the_logits_of_prompts(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: a graph writes logits for as many rows as its bucket has, here for all. Prompts
    that end in a step beside decode rows and log-probabilities have theirs behind those rows."""

    def tokens(engine: LLMEngine) -> dict[str, list[int]]:
        greedy = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
        engine.add_request("decoding", [3, 4], greedy)
        engine.step()
        engine.add_request("echo", random_prompt(30), replace(greedy, prompt_logprobs=1))
        engine.add_request("plain", random_prompt(30), greedy)
        return {name: token_ids(outputs) for name, outputs in run_to_end(engine).items()}

    engine = LLMEngine(engine_config(directory))
    expected = tokens(engine)
    passes, logits = engine._runner._passes, engine._runner._logits
    decode = passes.decode

    def padded(decodes: tuple[ScheduledDecode, ...]) -> Work:
        work = decode(decodes)

        def run() -> None:
            work()
            logits[len(decodes) :] = 0
            logits[len(decodes) :, 5] = 99

        return run

    monkeypatch.setattr(passes, "decode", padded)
    assert tokens(engine) == expected
    engine.close()


def test_fewer_alternatives_and_neighbours_that_want_none(engine: LLMEngine) -> None:
    prompt = random_prompt(80)
    wants = {"a": None, "b": 0, "c": 20, "d": 2}
    for name, count in wants.items():
        engine.add_request(name, prompt, SamplingParams(max_tokens=2, prompt_logprobs=count))
    outputs = run_to_end(engine)
    most = prompt_logprobs(outputs["c"])
    assert prompt_logprobs(outputs["a"]) == ()
    for name, count in (("b", 0), ("d", 2)):
        assert prompt_logprobs(outputs[name]) == tuple(
            e._replace(top_ids=e.top_ids[:count], top_logprobs=e.top_logprobs[:count]) for e in most
        )
    assert all(len(e.top_ids) == 20 and e.top_logprobs[0] >= e.logprob for e in most)


def test_a_replayed_prompt_does_not_repeat_them(directory: Path) -> None:
    prompt = random_prompt(100)
    (expected,) = of_alone(directory, [prompt])
    engine = LLMEngine(engine_config(directory, num_blocks=5))
    for name, ids, max_tokens in [("old", [1], 290), ("young", prompt, 150)]:
        params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=3, ignore_eos=True)
        engine.add_request(name, ids, params)
    outputs = run_to_end(engine)
    assert engine.stats().num_preemptions > 0
    assert prompt_logprobs(outputs["young"]) == expected
    assert len(token_ids(outputs["young"])) == 150
    engine.close()


def test_logits_that_are_not_finite_end_the_request(directory: Path) -> None:
    """A row of NaN in the middle of a prompt whose output nobody samples."""
    broken = LLMEngine(engine_config(directory))
    ops = broken._runner._ops
    lm_head = ops.lm_head

    def spoil(x: np.ndarray, weight: np.ndarray, out: np.ndarray) -> None:
        lm_head(x, weight, out)
        out[0] = np.nan

    ops.lm_head = spoil  # type: ignore[method-assign]
    broken.add_request("a", random_prompt(70), ECHO)
    (output,) = run_to_end(broken)["a"]
    assert (output.finish_reason, output.prompt_logprobs) == (FinishReason.ERROR, ())
    assert output.error is not None and "finite" in output.error
    assert_idle(broken)
    broken.close()


def test_aborting_in_the_middle_frees_everything(engine: LLMEngine) -> None:
    engine.add_request("a", random_prompt(700), ECHO)
    for _ in range(2):
        assert engine.step() == []
    engine.abort("a")
    assert run_to_end(engine) == {}
    assert_idle(engine)


def test_a_lower_priority_value_is_answered_first(directory: Path) -> None:
    engine = LLMEngine(engine_config(directory, max_num_seqs=1))
    for name, priority in [("first", 0), ("late", 3), ("soon", -1)]:
        engine.add_request(name, [1, 2], SamplingParams(max_tokens=2, priority=priority))
    ended = []
    while engine.has_work:
        ended += [output.request_id for output in engine.step() if output.finish_reason]
    assert ended == ["soon", "first", "late"]
    engine.close()


def test_the_offline_llm_gives_them(directory: Path) -> None:
    prompt = random_prompt(30)
    (expected,) = of_alone(directory, [prompt])
    with LLM(str(directory), device="cpu", max_num_seqs=2, kv_cache_memory=1 << 20) as llm:
        (completion,) = llm.generate([prompt], ECHO)
    assert completion.prompt_logprobs == expected
    assert (completion.text, completion.finish_reason) == ("", "length")
