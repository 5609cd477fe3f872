"""The serving benchmark against a scripted server: what it sends, counts and compares."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.scripted_completions import ScriptedServer, chunked, completion, usage, with_length
from tools import bench_serving
from tools.bench_answers import Outcome
from tools.bench_cells import TABLE
from tools.bench_client import Client
from tools.bench_data import FilePrompts, RandomPrompts
from tools.bench_load import Load, RunTimes
from tools.bench_report import comparison_table, distribution, over_runs, summarise


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    scripted = ScriptedServer()
    yield scripted
    scripted.close()


def bench(server: ScriptedServer, tmp_path: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    out = tmp_path / "result.json"
    common = ["--url", server.url, "--model", "m", "--json", str(out), "--hash", "text"]
    code = bench_serving.main([*common, *flags])
    return code, json.loads(out.read_text())


# ---- prompts -------------------------------------------------------------------------------------


def test_prompts_depend_on_seed_and_index_alone() -> None:
    prompts = RandomPrompts(50, 5, 9)
    first = prompts.prompt("s", 3).content
    assert first == RandomPrompts(50, 5, 9).prompt("s", 3).content
    assert first != prompts.prompt("s", 4).content and first != prompts.prompt("t", 3).content
    assert set(first) == {5, 6, 7, 8}


def test_shared_prefixes() -> None:
    prompts = RandomPrompts(30, prefix_len=20, num_prefixes=2)
    a, b, c = (prompts.prompt("s", index).content for index in range(3))
    assert a[:20] == c[:20] and a[20:] != c[20:] and a[:20] != b[:20] and len(a) == 30


def test_a_file_of_prompts_is_shuffled_and_repeated(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a", "max_tokens": 3}\n\n{"prompt": [1, 2]}\n{"prompt": "c"}\n')
    prompts = FilePrompts.read(path)
    drawn = [prompts.prompt("s", index) for index in range(6)]
    assert sorted(str(p.content) for p in drawn[:3]) == ["[1, 2]", "a", "c"]
    assert sorted(str(p.content) for p in drawn[3:]) == ["[1, 2]", "a", "c"]
    assert {p.max_tokens for p in drawn} == {3, None}
    path.write_text('{"prompt": "a"}\n{"text": "b"}\n')
    with pytest.raises(ValueError, match="jsonl:2"):
        FilePrompts.read(path)


# ---- whole runs ----------------------------------------------------------------------------------


def test_streams_warm_up_runs_and_the_repetition(server: ScriptedServer, tmp_path: Path) -> None:
    flags = ["--concurrency", "3", "--requests", "7", "--runs", "2", "--recheck", "4"]
    code, result = bench(server, tmp_path, *flags, "--input-len", "5", "--output-len", "10")
    (cell,) = result["cells"]
    assert code == 0
    assert cell["recheck"] == {"requests": 4, "equal": 4}
    assert server.most_open <= 3 and server.num_connections == 3
    assert [body["max_tokens"] for body in server.bodies] == [8] * 3 + [10] * 18
    assert len({str(body["prompt"]) for body in server.bodies}) == 3 + 14  # 4 are repeated
    for run in cell["runs"]:
        assert (run["failed"], run["short"], run["requests"]) == (0, 0, 7)
        assert (run["prompt_tokens"], run["output_tokens"]) == (35, 70)
    body = server.bodies[-1]
    assert body["temperature"] == 0 and body["ignore_eos"] and body["stream"]


def test_arrivals_do_not_wait_for_answers(server: ScriptedServer, tmp_path: Path) -> None:
    code, result = bench(server, tmp_path, "--qps", "1000", "--requests", "20", "--runs", "1")
    assert code == 0 and result["cells"][0]["runs"][0]["output_tokens"] == 20 * 128


def test_failed_and_short_outputs_are_counted(server: ScriptedServer, tmp_path: Path) -> None:
    normal = server.reply

    def reply(body: dict[str, Any]) -> bytes:
        number = len(server.bodies)
        if number == 4:
            return with_length("429 Too Many Requests", b'{"error": {"message": "queue full"}}')
        return normal({**body, "max_tokens": 5}) if number == 6 else normal(body)

    server.reply = reply  # type: ignore[method-assign]
    flags = ["--concurrency", "1", "--requests", "6", "--runs", "1", "--output-len", "9"]
    code, result = bench(server, tmp_path, *flags)
    (run,) = result["cells"][0]["runs"]
    assert code == 1
    assert (run["failed"], run["short"], run["errors"]) == (1, 1, ["429: queue full"])
    assert run["output_tokens"] == 4 * 9 + 5


def test_outputs_that_differ_alone_are_found(server: ScriptedServer, tmp_path: Path) -> None:
    normal = server.reply
    server.reply = lambda body: (  # type: ignore[method-assign]
        normal({**body, "prompt": [1]}) if len(server.bodies) == 1 + 2 + 2 else normal(body)
    )
    flags = ["--concurrency", "1", "--requests", "2", "--runs", "1", "--recheck", "2"]
    code, result = bench(server, tmp_path, *flags)
    assert code == 1 and result["cells"][0]["recheck"] == {"requests": 2, "equal": 1}


async def test_token_ids_are_asked_for_where_the_server_gives_them(server: ScriptedServer) -> None:
    ids = chunked(completion("x", "length", token_ids=[1]), usage(1, 1))
    refusal = with_length("400 Bad Request", b'{"error": {"message": "no return_token_ids"}}')
    for answer, expected in ((ids, "ids"), (refusal, "text")):
        server.reply = lambda _, answer=answer: answer  # type: ignore[method-assign, misc]
        fields: dict[str, Any] = {}
        found = await bench_serving.Bench(Client(server.url), fields, 0).find_hash("auto")
        assert found == expected and ("return_token_ids" in fields) == (expected == "ids")


# ---- numbers -------------------------------------------------------------------------------------


def test_percentiles_lie_between_values() -> None:
    figures = distribution([4.0, 1.0, 2.0, 3.0, 5.0])
    assert figures is not None
    assert (figures["mean"], figures["p50"], figures["max"]) == (3.0, 3.0, 5.0)
    assert figures["p90"] == pytest.approx(4.6)
    assert distribution([]) is None


def one_run(ttft: float, seconds: float) -> dict[str, Any]:
    outcome = Outcome(1e3 * ttft, 1e3 * ttft + 500, [500.0], 1, 2, "length", "ab")
    return summarise([outcome], [2], RunTimes(seconds, 0.0, 0.0))


def test_the_worst_rate_is_the_lowest_and_the_worst_time_the_longest() -> None:
    median, worst = over_runs([one_run(0.1, 1.0), one_run(0.3, 2.0), one_run(0.2, 4.0)])
    assert (median["output_tokens_per_s"], worst["output_tokens_per_s"]) == (1.0, 0.5)
    assert median["ttft_ms"]["p50"] == pytest.approx(200)
    assert worst["ttft_ms"]["p50"] == pytest.approx(300)


def test_comparison_shows_ratios_and_equal_outputs() -> None:
    def result(ttft: float) -> dict[str, Any]:
        runs = [one_run(ttft, 1.0)]
        median, worst = over_runs(runs)
        return {"cells": [{"name": "c=1 1/2", "runs": runs, "median": median, "worst": worst}]}

    table = comparison_table([("before", result(0.2)), ("after", result(0.1))])
    assert "x0.50" in table and "1/1" in table


def test_a_load_is_one_of_two() -> None:
    for wrong in (
        {},
        {"concurrency": 2, "qps": 1.0},
        {"concurrency": 0},
        {"qps": -1.0},
        {"qps": math.nan},
        {"qps": math.inf},
    ):
        with pytest.raises(ValueError, match="a load is"):
            Load(**wrong)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--table", "--cells", "c=4", "c=5"], "--cells: the table has no c=5"),
        (["--extra-body", "{"], "--extra-body: not valid JSON"),
        (["--extra-body", "[1]"], "--extra-body: must be a JSON object"),
        (["--compare", "nowhere.json"], "nowhere.json"),
        (["--compare", "README.md"], "README.md: not valid JSON"),
        (["--compare", "models/demo/config.json"], "config.json: no result"),
    ],
)
def test_what_cannot_be_measured_is_said_in_a_line(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert bench_serving.main(["--url", server.url, "--model", "m", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("bench_serving: ") and message in line
    assert server.bodies == []


def test_plots_without_matplotlib_are_refused_before_a_request(
    server: ScriptedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    flags = ["--url", server.url, "--model", "m", "--concurrency", "1", "--plots", "plots"]
    assert bench_serving.main(flags) == 2
    assert "--plots needs matplotlib" in capsys.readouterr().err and server.bodies == []


def test_the_table_measures_every_cell_of_the_budgets(
    server: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, result = bench(server, tmp_path, "--table", "--quick", "--cells", "c=4", "c=1 2048/1")
    assert code == 0
    assert [(cell["name"], len(cell["runs"])) for cell in result["cells"]] == [
        ("c=4 1024/128", 1),
        ("c=1 2048/1", 1),
    ]
    assert "c=4 1024/128" in capsys.readouterr().out.partition("must")[2]
    lengths = {(len(body["prompt"]), body["max_tokens"]) for body in server.bodies}
    assert lengths == {(1024, 8), (1024, 128), (2048, 1)}
    assert {str(cell.load) for cell in TABLE} == {
        *(f"c={count}" for count in (1, 4, 16, 64, 256)),
        *(f"QPS {rate}" for rate in (1, 2, 16)),
    }


def test_requests_of_a_cell(server: ScriptedServer, tmp_path: Path) -> None:
    words = "--table", "--quick", "--cells", "c=4", "--requests", "5"
    _, result = bench(server, tmp_path, *words)
    (cell,) = result["cells"]
    assert [run["requests"] for run in cell["runs"]] == [5]


def test_plots_are_of_shapes_at_two_loads(server: ScriptedServer, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    flags = ["--requests", "4", "--runs", "1", "--input-len", "3", "--output-len", "4"]
    plots = tmp_path / "plots"
    bench(
        server, tmp_path, "--concurrency", "1", "2", "--qps", "500", "--plots", str(plots), *flags
    )
    written = {path.name: path.read_bytes() for path in plots.iterdir()}
    assert written.keys() == {f"{n}_concurrency.png" for n in ("ttft", "tpot", "throughput")}
    assert all(data.startswith(b"\x89PNG") for data in written.values())
