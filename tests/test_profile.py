"""tools/profile.py: which launch belongs to which op, what they add up to, and a run on the CPU."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.tiny_engine import write_tiny_model
from tools import profile
from tools.kernel_timers import KernelTime
from tools.launch_log import Launch, LaunchLog, add_graph_times, cell_tables, make_cell
from tools.op_costs import Cost, op_cost, op_label


class FakeTimer:
    """Launch n takes n + 1 us, if it is the kernel that the log thinks it is."""

    name = "fake"
    sees_graphs = False

    def __init__(self, functions: list[str]) -> None:
        self._functions = functions
        self.num_launched = 0

    def start(self) -> None:
        self.num_launched = 0

    def hold(self) -> None:
        pass

    def launch(self, launch: Callable[[], None]) -> None:
        launch()
        self.num_launched += 1

    def stop(self) -> list[KernelTime]:
        return [KernelTime(name, 1.0 + i) for i, name in enumerate(self._functions)]


def log_over(functions: list[str]) -> tuple[LaunchLog, Any, list[str]]:
    """A log, the library that it watches, and what was really launched."""
    launched: list[str] = []
    config = SimpleNamespace(num_attributes=1)
    library = SimpleNamespace(
        launch=lambda name, *args: launched.append(f"{name}{config.num_attributes}"),
        _kernel=lambda name: SimpleNamespace(_config=config),
        _entries={name: {"function": f"{name}_kernel"} for name in "abc"},
    )
    log = LaunchLog(FakeTimer(functions))
    log.watch(library)
    return log, library, launched


def step_of(log: LaunchLog, library: Any) -> Callable[[], None]:
    def step() -> None:
        log.begin("step", ())
        for op, kernels in (("rms_norm", "a"), ("attention_decode", "bc")):
            log.begin(op, (np.zeros((2, 4, 8)),) * 4)
            for kernel in kernels:
                library.launch(kernel, (1, 1, 1), 32)
            log.end()
        library.launch("a", (1, 1, 1), 32)
        log.end()

    return step


def test_launches_belong_to_the_op_around_them() -> None:
    log, library, launched = log_over(["a_kernel", "b_kernel", "c_kernel", "a_kernel"])
    step = step_of(log, library)
    step()  # not recorded, launched all the same
    timed = log.record(step, [(4, 5)])
    assert launched == ["a1", "b1", "c1", "a1", "a0", "b0", "c0", "a0"]  # recorded: none early
    assert [(launch.op, launch.kernel, us) for launch, us in timed] == [
        ("rms_norm", "a", 1.0),
        ("attention_decode", "b", 2.0),
        ("attention_decode", "c", 3.0),
        ("", "a", 4.0),
    ]
    assert timed[1][0].call == timed[2][0].call != timed[0][0].call


@pytest.mark.parametrize("functions", [["a_kernel"] * 4, ["a_kernel", "b_kernel", "c_kernel"]])
def test_times_of_other_kernels_are_not_taken_for_ours(functions: list[str]) -> None:
    log, library, _ = log_over(functions)
    with pytest.raises(RuntimeError, match="timed"):
        log.record(step_of(log, library), [(4, 5)])


def test_a_cell_sums_calls_and_takes_medians_of_like_steps() -> None:
    cost = Cost(4e6, 1e9)
    gemm = Launch("linear 2x2", 0, cost, "gemm", "")
    pair = [Launch("attention", 1, cost, name, "") for name in ("split", "combine")]
    rare = Launch("scatter", 2, None, "scatter", "")
    steps = [[(gemm, us), (pair[0], 1.0), (pair[1], 2.0)] for us in (3.0, 9.0, 5.0)]
    steps.append([(rare, 100.0), *steps[0]])
    cell = make_cell("step", steps, (1e12, 1e15))
    assert cell.kernels_us == 5.0 + 1.0 + 2.0
    rows = {op.op: op for op in cell.ops}
    assert rows.keys() == {"linear 2x2", "attention"}
    attention = rows["attention"]  # two kernels, one call, one cost
    assert (attention.calls, attention.microseconds, attention.bytes) == (1, 3.0, 4e6)
    assert attention.roof_us == pytest.approx(4.0)  # by its bytes; by its FLOPs it were 1
    text = cell_tables(cell, 10)
    assert "62.5%" in text and "combine" in text and "scatter" not in text


def test_times_in_graphs_run_from_end_to_end() -> None:
    launches = [
        Launch("a", 0, None, "one", "one_kernel"),
        Launch("b", 1, None, "two", "two_kernel"),
    ]
    cell = make_cell("step", [[(launch, 5.0) for launch in launches]], (0, 0))
    ends = [
        [KernelTime("one_kernel", 4.0, 104.0), KernelTime("two_kernel", 5.0, 104.0 + added)]
        for added in (3.0, 2.0, 7.0)
    ]
    other = [KernelTime("two_kernel", 1.0, 1.0)]
    add_graph_times(cell, [other])
    assert cell.ops[0].graph_us is None
    add_graph_times(cell, [other, *ends])
    assert {op.op: op.graph_us for op in cell.ops} == {"a": 4.0, "b": 3.0}
    assert {row.kernel: row.graph_us for row in cell.kernels} == {"one": 4.0, "two": 3.0}


def test_costs() -> None:
    x, weight, out = (np.zeros(shape, np.float16) for shape in ((3, 8), (16, 8), (3, 16)))
    assert op_cost("linear", (x, weight, out), ()) == (2 * (24 + 128 + 48), 2 * 3 * 16 * 8)
    assert op_label("linear", (x, weight, out)) == "linear 16x8"
    q, k_cache = np.zeros((2, 4, 8), np.float16), np.zeros((5, 2, 64, 8), np.float16)
    args = (q, None, k_cache, k_cache, None, None, q)
    decode = op_cost("attention_decode", args, [(9, 10), (99, 100)])
    assert decode == (2 * 110 * 2 * 8 * 2 + 3 * q.nbytes, 4 * 4 * 8 * 110)
    prefill = op_cost("attention_prefill", args, [(0, 2)])
    assert prefill is not None and prefill.flops == 4 * 4 * 8 * 3  # one pair, then two
    assert op_cost("scatter", (), ()) is None


def test_a_run_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_tiny_model(tmp_path / "model")
    out = tmp_path / "profile.json"
    flags = ["--model-path", str(model), "--device", "cpu", "--json", str(out)]
    assert profile.main([*flags, "--decode", "3", "--context", "40", "--prefill", "70"]) == 0
    decode, prefill = json.loads(out.read_text())["cells"]
    assert (decode["name"], prefill["name"]) == (
        "decode step, 3 rows, context 40",
        "prefill of 70 tokens",
    )
    calls = {row["op"].split()[0]: row["calls"] for row in decode["ops"]}
    assert calls["attention_decode"] == calls["delta_net_decode"] == calls["sample"] == 1
    assert calls["linear_silu_mul_decode"] == 2
    assert {row["op"] for row in prefill["ops"]} >= {"delta_rule_prefill", "causal_conv1d"}
    assert all(row["microseconds"] > 0 for cell in (decode, prefill) for row in cell["ops"])
    assert "attention_decode" in capsys.readouterr().out


@pytest.mark.parametrize(
    "flags",
    [
        ["--model-path", "nowhere"],
        ["--size", "5B"],
        ["--decode", "0"],
        ["--prefill", "-3"],
        ["--decode", "1", "--context", "0"],
        ["--decode", "1", "--context", "100000"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_profiled_is_said_in_a_line(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model(tmp_path / "model")
    with pytest.raises(SystemExit) as ended:
        sys.exit(profile.main(["--model-path", str(model), "--device", "cpu", *flags]))
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("profile") or ": error: " in last


def test_a_profiler_that_is_missing_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert profile.main(["--nsys", "out"]) == 2
    assert "nsys is not installed" in capsys.readouterr().err


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("program", ["nsys", "ncu"])
def test_a_profiler_runs_the_same_steps(
    program: str, joined: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = tmp_path / "seen"
    stand_in = tmp_path / program
    stand_in.write_text(f'#!/bin/sh\nfor word in "$@"; do echo "$word"; done > {seen}\nexit 7\n')
    stand_in.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    chosen = [f"--{program}=out"] if joined else [f"--{program}", "out"]
    assert profile.main(["--decode", "2", *chosen, "--size", "small"]) == 7
    words = seen.read_text().split()
    assert words[words.index("-o") + 1] == "out"
    program_words = words[words.index("tools.profile") + 1 :]
    assert program_words == ["--decode", "2", "--size", "small", "--profiled"]
