"""Whole engines with grammars: what comes out follows them, and nobody else notices."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from deltaserve.engine.grammar import Grammar, GrammarError
from deltaserve.engine.llm_engine import LLMEngine
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.sequence import FinishReason, RequestOutput
from deltaserve.engine.tokenizer import Tokenizer
from tests.random_schemas import random_schema
from tests.tiny_checkpoint import IM_END_ID, IM_START_ID
from tests.tiny_engine import (
    DelayingDevice,
    assert_idle,
    engine_config,
    run_to_end,
    token_ids,
    write_tiny_model,
)

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer(directory)


@pytest.fixture(scope="module")
def engine(directory: Path) -> Iterator[LLMEngine]:
    engine = LLMEngine(engine_config(directory, num_blocks=128, max_num_seqs=32))
    yield engine
    assert_idle(engine)
    engine.close()


def constrained(kind: str, text: str, seed: int = 0, **options: object) -> SamplingParams:
    grammar = Grammar(kind, text, **options)  # type: ignore[arg-type]
    return SamplingParams(max_tokens=60, seed=seed, grammar=grammar)


def generate(engine: LLMEngine, *params: SamplingParams) -> list[list[RequestOutput]]:
    for i, own in enumerate(params):
        engine.add_request(str(i), PROMPT, own)
    outputs = run_to_end(engine)
    return [outputs[str(i)] for i in range(len(params))]


def test_what_is_not_cut_off_validates(engine: LLMEngine, tokenizer: Tokenizer) -> None:
    """150 random schemas at temperature 1."""
    rng = random.Random(5)
    schemas = {str(i): random_schema(rng) for i in range(150)}
    for name, schema in schemas.items():
        grammar = Grammar("json_schema", json.dumps(schema))
        params = SamplingParams(max_tokens=120, seed=int(name), grammar=grammar)
        engine.add_request(name, PROMPT, params)
    outputs = run_to_end(engine)
    complete = 0
    for name, schema in schemas.items():
        reason = outputs[name][-1].finish_reason
        assert reason in (FinishReason.STOP, FinishReason.LENGTH), outputs[name][-1].error
        if reason is FinishReason.STOP:
            complete += 1
            value = json.loads(tokenizer.decode(token_ids(outputs[name])))
            jsonschema.validate(value, schema, jsonschema.Draft202012Validator)
    assert complete >= 125


@pytest.mark.parametrize("device", [None, DelayingDevice], ids=["prompt", "late"])
def test_neighbours_and_preempted_rows_are_as_alone(
    directory: Path, device: type[DelayingDevice] | None
) -> None:
    """Rows with grammars, without, and with bad words too, where blocks are too few for all."""
    prompt = [*range(60)]
    long = Grammar("regex", "[a-z]{50}[0-9]{150}")
    params = {
        "free": SamplingParams(max_tokens=75, seed=1, ignore_eos=True),
        "long": SamplingParams(max_tokens=75, seed=2, grammar=long),
        "both": SamplingParams(
            max_tokens=75, seed=3, grammar=long, bad_words=tuple((97, i) for i in range(98, 110))
        ),
        "greedy": SamplingParams(max_tokens=75, temperature=0.0, ignore_eos=True),
        "json": SamplingParams(max_tokens=40, seed=4, grammar=Grammar("json_schema", "{}")),
    }

    def run(*names: str, num_blocks: int) -> tuple[dict[str, list[int]], dict[object, str], int]:
        hashes: dict[object, str] = {}

        def note(name: str, position: int, row: np.ndarray) -> None:
            assert (name, position) not in hashes
            hashes[name, position] = hashlib.sha256(row.tobytes()).hexdigest()

        config = engine_config(directory, num_blocks, max_model_len=192, prefill_chunk=64)
        engine = LLMEngine(config, logits_hook=note, device=device() if device else None)
        for name in names:
            engine.add_request(name, prompt, params[name])
        ids = {name: token_ids(outputs) for name, outputs in run_to_end(engine).items()}
        num_preemptions = engine.stats().num_preemptions
        assert_idle(engine)
        engine.close()
        return ids, hashes, num_preemptions

    together, hashes, num_preemptions = run(*params, num_blocks=5)
    assert num_preemptions > 0
    for name in params:
        alone, own_hashes, _ = run(name, num_blocks=4)
        assert together[name] == alone[name]
        assert len(alone[name]) > 1
        for position in range(len(prompt), len(prompt) + len(alone[name])):
            assert hashes[name, position] == own_hashes[name, position]
    pairs = zip(together["both"], together["both"][1:], strict=False)
    assert not [pair for pair in pairs if pair in params["both"].bad_words]
    text = Tokenizer(directory).decode(together["long"])
    assert text[:50].isalpha() and text[50:].isdigit()


def test_an_output_ends_where_its_grammar_must(engine: LLMEngine, tokenizer: Tokenizer) -> None:
    """Also where end ids are to be ignored; and stop ids that are text end it sooner."""
    grammar = Grammar("regex", "abc[0-9]{2}")
    plain, ignoring, stopped = generate(
        engine,
        SamplingParams(grammar=grammar),
        SamplingParams(grammar=grammar, ignore_eos=True),
        SamplingParams(grammar=grammar, stop_token_ids=(ord("c"),)),
    )
    for outputs in (plain, ignoring):
        text = tokenizer.decode(token_ids(outputs))
        assert text[:3] == "abc" and text[3:].isdigit() and len(text) == 5
        assert outputs[-1].finish_reason is FinishReason.STOP
        assert outputs[-1].stop_id in engine.end_ids
    assert token_ids(stopped) == list(b"abc")


def test_free_until_the_ids_that_it_starts_after(engine: LLMEngine, tokenizer: Tokenizer) -> None:
    """Reasoning cannot end the output, and one token of newlines may follow it."""
    starts = [
        constrained("regex", "[xyz]{4}", seed, start_after=(IM_START_ID,)) for seed in range(12)
    ]
    seen = 0
    for outputs in generate(engine, *starts):
        ids = token_ids(outputs)
        if IM_START_ID not in ids:
            assert outputs[-1].finish_reason is FinishReason.LENGTH
            assert not engine.end_ids & set(ids)
            continue
        seen += 1
        before = ids.index(IM_START_ID)
        after = tokenizer.decode(ids[before + 1 :]).removeprefix("\n")
        assert set(after) <= set("xyz") and len(after) <= 4
        assert not engine.end_ids & set(ids[:before])
        if outputs[-1].finish_reason is FinishReason.STOP:
            assert len(after) == 4
    assert seen > 0


def test_a_grammar_that_other_parameters_contradict_fails_alone(engine: LLMEngine) -> None:
    wrong, plain = generate(
        engine,
        SamplingParams(grammar=Grammar("regex", "a"), min_tokens=3),
        SamplingParams(max_tokens=5, ignore_eos=True),
    )
    assert token_ids(wrong) == list(b"a")
    assert wrong[-1].finish_reason is FinishReason.ERROR
    assert wrong[-1].error_param == "grammar"
    assert wrong[-1].error == (
        "grammar: leaves no token that may be sampled, together with min_tokens"
    )
    assert len(token_ids(plain)) == 5


def test_a_grammar_that_outgrows_its_limits_fails_and_does_not_end_early(
    engine: LLMEngine,
) -> None:
    rules = range(3000)
    text = "start: " + " | ".join(f"r{i}" for i in rules)
    text += "".join(f'\nr{i}: "k{i:04}" r{(i * 7) % 3000}' for i in rules)
    (outputs,) = generate(engine, constrained("lark", text))
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert outputs[-1].error == "grammar: leaves no token that may be sampled"


def test_an_aborted_request_leaves_nothing(engine: LLMEngine) -> None:
    engine.add_request("a", PROMPT, constrained("regex", "[a-z]{50}"))
    for _ in range(4):
        engine.step()
    engine.abort("a")
    run_to_end(engine)
    assert_idle(engine)


def test_a_refused_grammar_is_named_as_its_sender_calls_it(engine: LLMEngine) -> None:
    for field in ("guided_regex", "structured_outputs"):
        with pytest.raises(GrammarError, match=f"^{field}: .*unclosed group") as caught:
            engine.add_request("a", PROMPT, constrained("regex", "(", field=field))
        assert caught.value.field == field
    assert_idle(engine)
    assert IM_END_ID in engine.end_ids
