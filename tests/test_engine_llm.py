"""The offline LLM and LLMEngine's requests: prompts to completions, endings, refusals, failures."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from deltaserve.engine import LLM, Completion, SamplingParams
from deltaserve.engine.llm_engine import LLMEngine
from deltaserve.engine.ops.cuda import detect
from deltaserve.engine.ops.numpy.sampling import draw_id, random_bits
from deltaserve.engine.request_queue import QueueFullError, RequestTooLargeError
from deltaserve.engine.sequence import FinishReason
from tests.tiny_checkpoint import NUM_TOKENS
from tests.tiny_engine import (
    assert_idle,
    engine_config,
    run_to_end,
    token_ids,
    write_tiny_model,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(directory: Path) -> Iterator[LLM]:
    options = dataclasses.asdict(engine_config(directory))
    with LLM(options.pop("model_path"), **options) as llm:
        yield llm
        assert_idle(llm.engine)


@pytest.fixture
def engine(directory: Path) -> Iterator[LLMEngine]:
    engine = LLMEngine(engine_config(directory))
    yield engine
    engine.close()


def test_a_string_gives_one_completion(llm: LLM) -> None:
    [completion] = llm.generate("the rain in", GREEDY)
    assert len(completion.token_ids) == 8
    assert completion.text == llm.tokenizer.decode(completion.token_ids)
    assert (completion.finish_reason, completion.stop_reason) == ("length", None)
    assert completion.logprobs == ()


def test_text_and_its_ids_are_the_same_prompt(llm: LLM) -> None:
    texts = ["the rain in", "a", "on and on and on"]
    ids = [llm.tokenizer.encode(text) for text in texts]
    assert llm.generate(texts, GREEDY) == llm.generate(ids, GREEDY)


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    lengths = [1, 5, 3]
    params = [dataclasses.replace(GREEDY, max_tokens=n) for n in lengths]
    completions = llm.generate(["a", "a", "a"], params)
    assert [len(c.token_ids) for c in completions] == lengths
    assert completions[0].token_ids == completions[1].token_ids[:1]


def test_prompts_and_parameters_must_be_as_many(llm: LLM) -> None:
    with pytest.raises(ValueError, match="params: 1 of them for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])


def test_ids_of_one_prompt_in_the_place_of_prompts_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="lists of token ids, one among them is 5"):
        llm.generate([5, 6], GREEDY)  # type: ignore[list-item]


def test_a_wrong_generation_config_is_refused(directory: Path) -> None:
    with pytest.raises(ValueError, match="generation_config: must be auto or none, got 'None'"):
        LLM(str(directory), generation_config="None")  # type: ignore[arg-type]


def test_more_prompts_than_the_queue_holds(directory: Path) -> None:
    options = dataclasses.asdict(engine_config(directory, max_queue=2))
    with LLM(options.pop("model_path"), **options) as llm:
        completions = llm.generate([[i] for i in range(12)], GREEDY)
    assert len({c.token_ids for c in completions}) > 6


def test_a_seed_repeats_and_its_absence_does_not(llm: LLM) -> None:
    def run(seed: int | None) -> Completion:
        params = SamplingParams(max_tokens=30, seed=seed, temperature=1.5, ignore_eos=True)
        return llm.generate("a", params)[0]

    assert run(5) == run(5)
    assert run(5) != run(6)
    assert run(None) != run(None)


def test_a_draw_is_keyed_by_the_seed_and_the_tokens_position(directory: Path) -> None:
    rows: dict[int, np.ndarray] = {}
    engine = LLMEngine(
        engine_config(directory),
        logits_hook=lambda name, position, row: rows.update({position: row.copy()}),
    )
    params = SamplingParams(max_tokens=12, seed=-3, top_p=0.9, ignore_eos=True)
    engine.add_request("a", [1, 2, 3, 4, 5], params)
    ids = token_ids(run_to_end(engine)["a"])
    engine.close()
    assert sorted(rows) == list(range(5, 17))
    seeds, positions = np.full(12, 2**64 - 3, np.uint64), np.arange(5, 17, dtype=np.uint64)
    expected = [
        draw_id(rows[position][:NUM_TOKENS], 1.0, 0, np.float32(0.9), 0.0, bits)
        for position, bits in enumerate(random_bits(seeds, positions).tolist(), start=5)
    ]
    assert ids == expected


def test_the_engines_seed_makes_unseeded_requests_repeatable(directory: Path) -> None:
    def run() -> list[Completion]:
        options = dataclasses.asdict(engine_config(directory, seed=3))
        with LLM(options.pop("model_path"), **options) as llm:
            return llm.generate(["a", "a"], SamplingParams(max_tokens=20, temperature=1.5))

    first = run()
    assert first == run()
    assert first[0] != first[1]


def test_stop_string_ends_the_text_and_the_request(llm: LLM) -> None:
    params = dataclasses.replace(GREEDY, max_tokens=40)
    [whole] = llm.generate("the rain in", params)
    stop = next(text for n in range(1, 9) if (text := whole.text[n : n + 2]).isprintable())
    assert stop
    [cut] = llm.generate("the rain in", dataclasses.replace(params, stop=(stop,)))
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
    assert stop in llm.tokenizer.decode(cut.token_ids)
    assert stop not in llm.tokenizer.decode(cut.token_ids[:-1])


def test_logprobs_are_of_the_chosen_tokens(llm: LLM) -> None:
    [completion] = llm.generate("the rain in", dataclasses.replace(GREEDY, logprobs=3))
    assert [entry.token_id for entry in completion.logprobs] == list(completion.token_ids)
    for entry in completion.logprobs:
        assert len(entry.top) == 3
        assert entry.top[0] == (entry.token, entry.logprob)  # greedy: the chosen one is the top
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
    [none] = llm.generate("the rain in", dataclasses.replace(GREEDY, logprobs=0))
    assert [entry.top for entry in none.logprobs] == [()] * 8
    assert none.token_ids == completion.token_ids


def test_end_ids_of_the_config_end_and_ignore_eos_goes_on(directory: Path, tmp_path: Path) -> None:
    engine = LLMEngine(engine_config(directory))
    engine.add_request("a", [1, 2, 3], GREEDY)
    ids = token_ids(run_to_end(engine)["a"])
    engine.close()
    assert ids[3] not in ids[:3]
    write_tiny_model(tmp_path, generation_eos=[ids[3]])
    engine = LLMEngine(engine_config(tmp_path))
    assert ids[3] in engine.end_ids
    engine.add_request("stops", [1, 2, 3], dataclasses.replace(GREEDY, ignore_eos=False))
    engine.add_request("goes on", [1, 2, 3], GREEDY)
    outputs = run_to_end(engine)
    assert token_ids(outputs["stops"]) == ids[:4]
    last = outputs["stops"][-1]
    assert (last.finish_reason, last.stop_id) == (FinishReason.STOP, ids[3])
    assert token_ids(outputs["goes on"]) == ids
    assert_idle(engine)
    engine.close()


def test_ids_are_sampled_below_the_tokenizers_limit(llm: LLM) -> None:
    """The embedding has padding rows beyond it."""
    assert llm.engine.vocab_limit == NUM_TOKENS < llm.engine.model_config.vocab_size
    params = SamplingParams(max_tokens=200, temperature=5.0, seed=1, ignore_eos=True)
    [completion] = llm.generate("a", params)
    assert max(completion.token_ids) < NUM_TOKENS


@pytest.mark.parametrize("bad", [-1, NUM_TOKENS, 10**9])
def test_prompt_ids_outside_the_vocabulary_are_refused(engine: LLMEngine, bad: int) -> None:
    with pytest.raises(ValueError, match=f"token id {bad}; the model's ids are 0 to"):
        engine.add_request("a", [1, bad], GREEDY)
    assert_idle(engine)


def test_requests_that_cannot_run_are_refused(engine: LLMEngine) -> None:
    with pytest.raises(RequestTooLargeError, match="1021 tokens"):
        engine.add_request("a", [1] * 1021, GREEDY)
    with pytest.raises(ValueError, match="at least one token"):
        engine.add_request("a", [], GREEDY)
    assert_idle(engine)


def test_a_refused_prompt_leaves_nothing_of_the_others(llm: LLM) -> None:
    with pytest.raises(ValueError):
        llm.generate([[1], [2], [NUM_TOKENS]], GREEDY)
    while llm.engine.has_work:
        llm.engine.step()
    assert_idle(llm.engine)


def test_queue_limit(directory: Path) -> None:
    engine = LLMEngine(engine_config(directory, max_queue=1, max_num_seqs=1))
    for request_id in "ab":
        engine.add_request(request_id, [1], GREEDY)
    with pytest.raises(QueueFullError):
        engine.add_request("c", [1], GREEDY)
    assert list(run_to_end(engine)) == ["a", "b"]
    engine.close()


@pytest.mark.parametrize("num_steps", range(6))
def test_abort_in_every_state_frees_everything(directory: Path, num_steps: int) -> None:
    """Queued, in prefill (two chunks of 200 tokens), in decode; others are not disturbed."""
    config = engine_config(directory, max_num_seqs=1, max_num_batched_tokens=128)
    engine = LLMEngine(config)
    engine.add_request("a", [5] * 200, GREEDY)
    engine.add_request("b", [6] * 10, GREEDY)
    for _ in range(num_steps):
        engine.step()
    engine.abort("a")
    engine.abort("a")
    engine.abort("never seen")
    assert [seq.request_id for seq in engine.open_sequences] == ["b"]
    outputs = run_to_end(engine)
    assert list(outputs) == ["b"]
    assert len(token_ids(outputs["b"])) == 8
    assert_idle(engine)
    engine.close()


def test_a_row_that_is_not_finite_ends_its_request_alone(directory: Path) -> None:
    def run(poison: bool) -> dict[str, list[int]]:
        def hook(name: str, position: int, row: np.ndarray) -> None:
            if poison and (name, position) == ("b", 6):
                row[3] = np.nan

        engine = LLMEngine(engine_config(directory), logits_hook=hook)
        for name in "abc":
            engine.add_request(name, [ord(name)] * 4, GREEDY)
        outputs = run_to_end(engine)
        if poison:
            last = outputs["b"][-1]
            assert (last.finish_reason, last.token_ids) == (FinishReason.ERROR, ())
            assert last.error is not None
        assert_idle(engine)
        engine.close()
        return {name: token_ids(of_one) for name, of_one in outputs.items()}

    good, bad = run(poison=False), run(poison=True)
    assert bad == good | {"b": good["b"][:2]}


def test_stats_count(engine: LLMEngine) -> None:
    engine.add_request("a", [1] * 70, GREEDY)
    engine.add_request("b", [1] * 5, GREEDY)
    assert engine.stats().num_waiting == 2
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting) == (2, 0)
    assert stats.num_blocks - stats.num_free_blocks == 3
    assert stats.num_state_slots - stats.num_free_state_slots == 2
    run_to_end(engine)
    stats = engine.stats()
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (75, 16)
    assert_idle(engine)


def test_recent_batches_are_the_last_steps(engine: LLMEngine) -> None:
    engine.add_request("a", [1] * 70, dataclasses.replace(GREEDY, max_tokens=20))
    run_to_end(engine)
    batches = engine.recent_batches
    assert len(batches) == 8
    assert [batch.decodes[0].position for batch in batches] == list(range(81, 89))


def test_progress_reports_loading(directory: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    engine = LLMEngine(engine_config(directory), progress=lambda *report: seen.append(report))
    engine.close()
    weights = [(done, total) for stage, done, total in seen if stage == "weights"]
    assert weights[-1][0] == weights[-1][1] > 0


def test_cuda_is_refused_in_words_where_there_is_none(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(detect, "find_gpus", list)
    with pytest.raises(ValueError, match=r"device.*cuda"):
        LLMEngine(dataclasses.replace(engine_config(directory), device="cuda"))


def test_importing_the_package_loads_no_numpy() -> None:
    code = (
        "import sys, deltaserve.engine; assert 'numpy' not in sys.modules; "
        "from deltaserve.engine import SamplingParams; assert 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_prompt_that_is_preempted_half_way_counts_once(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, max_position_embeddings=8192)
    options = {"max_model_len": 4480, "max_num_batched_tokens": 256, "prefill_chunk": 64}
    engine = LLMEngine(engine_config(tmp_path, 73, **options))
    for name in "abc":  # each takes two more blocks while the long prompt is prefilled
        params = dataclasses.replace(GREEDY, max_tokens=68)
        engine.add_request(name, [ord(name)] * 63, params)
    engine.add_request("long", [1] * 4260, dataclasses.replace(GREEDY, max_tokens=1))
    run_to_end(engine)
    stats = engine.stats()
    assert stats.num_preemptions == 1
    assert stats.num_prompt_tokens == 3 * 63 + 4260
    engine.close()
