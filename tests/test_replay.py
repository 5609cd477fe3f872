"""tools/replay.py: a request of a crash dump, run again, gives the same ids."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from deltaserve.engine.async_engine import AsyncEngine
from deltaserve.engine.core_process import EngineProcess
from deltaserve.engine.engine_request import EngineUnavailable
from deltaserve.engine.grammar import Grammar
from deltaserve.engine.llm_engine import LLMEngine
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.sequence import RequestOutput
from tests.crashing_engine import build_crashing_engine
from tests.tiny_engine import engine_config, run_to_end, write_tiny_model
from tools import replay

PROMPTS = {"drawn": [5] * 100, "seeded": list(range(1, 70)), "biased": [9, 8, 7]}
PARAMS = {
    "drawn": SamplingParams(max_tokens=200, temperature=0.9, ignore_eos=True),
    "seeded": SamplingParams(max_tokens=200, temperature=0.7, top_p=0.9, seed=3, ignore_eos=True),
    "biased": SamplingParams(
        max_tokens=200,
        temperature=0.5,
        logit_bias=((3, 2.0),),
        bad_words=((4, 5),),
        ignore_eos=True,
    ),
}


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of three requests that ran together when the engine failed; the model is gone from where it
    was."""
    directory = tmp_path_factory.mktemp("crash")
    model = write_tiny_model(directory / "model")
    config = engine_config(model, enable_prefix_caching=False)

    async def crash() -> dict[str, list[int]]:
        engine = AsyncEngine(EngineProcess(config, build_crashing_engine, directory))
        received: dict[str, list[int]] = {name: [] for name in PROMPTS}

        async def read(name: str) -> None:
            output: RequestOutput
            async for output in engine.generate(PROMPTS[name], PARAMS[name], name):
                received[name] += output.token_ids

        await engine.start()
        await engine.ready_or_dead.wait()
        ends = await asyncio.gather(*map(read, PROMPTS), return_exceptions=True)
        assert all(isinstance(end, EngineUnavailable) for end in ends)
        await engine.close()
        return received

    received = asyncio.run(crash())
    (path,) = directory.glob("deltaserve-crash-*.json")
    recorded = {r["request_id"]: r["output_ids"] for r in json.loads(path.read_text())["requests"]}
    assert recorded == received and all(len(ids) > 5 for ids in recorded.values())
    shutil.move(model, directory / "moved")
    yield path


def moved_model(dump: Path) -> str:
    return str(dump.parent / "moved")


@pytest.mark.parametrize("name", list(PROMPTS))
def test_the_recorded_ids_come_out_again(
    dump: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [str(dump), "--request", name, "--model-path", moved_model(dump)]
    assert replay.main([*arguments, "--max-tokens", "60"]) == 0
    recorded = next(r for r in json.loads(dump.read_text())["requests"] if r["request_id"] == name)[
        "output_ids"
    ]
    more = 60 - len(recorded)
    assert f"all {len(recorded)} recorded ids came out again, and {more} more" in (
        capsys.readouterr().out
    )


def test_an_id_that_differs_is_named(
    dump: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = json.loads(dump.read_text())
    request = next(r for r in content["requests"] if r["request_id"] == "drawn")
    request["output_ids"][4] += 1
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(content))
    flags = ["--model-path", moved_model(dump), "--max-tokens", "10", "--max-num-seqs", "1"]
    assert replay.main([str(wrong), "--request", "drawn", *flags]) == 1
    assert "output token 4 is" in capsys.readouterr().out


def test_fewer_tokens_than_the_request_had_to_have(dump: Path, tmp_path: Path) -> None:
    content = json.loads(dump.read_text())
    request = next(r for r in content["requests"] if r["request_id"] == "seeded")
    request["params"]["min_tokens"] = 150
    path = tmp_path / "least.json"
    path.write_text(json.dumps(content))
    flags = ["--model-path", moved_model(dump), "--max-tokens", "5", "--max-num-seqs", "1"]
    assert replay.main([str(path), "--request", "seeded", *flags]) == 0


@pytest.mark.parametrize("max_tokens", ["0", "-1", "100000"])
def test_what_cannot_run_is_no_failure_of_the_engine(
    dump: Path, max_tokens: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--model-path", moved_model(dump), "--max-tokens", max_tokens]
    assert replay.main([str(dump), "--request", "seeded", *flags]) == 2
    output = capsys.readouterr()
    assert "max_tokens" in output.err and output.out == ""


def test_settings_are_those_of_the_engine_that_failed(dump: Path) -> None:
    content = replay.read_dump(dump)
    config = replay.engine_config(content, model_path=moved_model(dump))
    assert (config.max_num_seqs, config.prefill_chunk, config.max_num_batched_tokens) == (
        4,
        128,
        256,
    )
    assert not config.enable_prefix_caching
    engine = LLMEngine(config)
    assert dataclasses.asdict(engine.capacity) == content["capacity"]
    engine.add_request("x", [1], SamplingParams(max_tokens=1))
    run_to_end(engine)
    engine.close()


def test_parameters_are_those_that_the_request_had() -> None:
    grammar = Grammar("regex", "[a-z]+", start_after=(5, 6), field="guided_regex")
    params = SamplingParams(grammar=grammar, bad_words=((1, 2), (3,)), logit_bias=((3, 2.0),))
    dumped = {"params": json.loads(json.dumps(dataclasses.asdict(params))), "seed": 7}
    assert replay.sampling_params(dumped) == dataclasses.replace(params, seed=7)


def test_a_dump_is_described(dump: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert replay.main([str(dump)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("RuntimeError: an illegal memory access")
    assert "seeded: running, 69 prompt tokens" in text and "3 decode rows" in text


@pytest.mark.parametrize("content", ["", "{}", '{"format": 99}', "[1]"])
def test_other_files_are_refused(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    assert replay.main([str(path)]) == 2
    assert "other.json" in capsys.readouterr().err
