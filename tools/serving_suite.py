"""Everything that a server must show under load, on servers that this starts, one after the other.

    python -m tools.serving_suite --out FILE [--size 4B | --model-path DIR] [--only PART ...]

table:       default flags; tools/bench_serving.py --table, some outputs under load repeated alone.
equal:       the c=64 and c=256 cells with CUDA graphs, without, and with so few KV blocks that
             requests are preempted: the same outputs, and some preempted.
loads, soak: tools/server_checks.py mixed and overload, and soak.
sizes:       9B and 27B: c=1 and c=64.
engine:      tools/bench_engine.py, what the same requests take without HTTP; after `table`, the
             share of it that its cells reach must be at least --min-share.

Without --model-path: random weights of true shapes. FILE gets every tool's JSON; what the servers
and tools say goes to files beside it. Prints a line a part; exits with 1 if anything fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.gpu_check import ROOT, make_importable
from tools.make_dummy_model import write_dummy_model
from tools.model_shapes import SIZES

START_SECONDS = 180.0
STOP_SECONDS = 60.0
LOADED_CELLS = ("c=64 1024/128", "c=256 1024/128")
ALONE = (64, 256), 1024, 128
"""Streams, prompt and output tokens of the cells that are also run without HTTP."""
FEW_BLOCKS = "1500M"
"""Of KV cache: about 40 sequences of 1,152 tokens of 4B."""


@dataclass
class Suite:
    out: Path
    folder: Path
    model_path: Path | None
    options: argparse.Namespace
    results: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    def serve_words(self, size: str) -> list[str]:
        if self.model_path is not None:
            return ["--model-path", str(self.model_path)]
        folder = self.folder / f"dummy-{size}"
        if not folder.exists():
            write_dummy_model(folder, size)
        return ["--model-path", str(folder), "--load-format", "dummy"]

    @contextlib.contextmanager
    def server(self, name: str, *flags: str, size: str | None = None) -> Iterator[Served]:
        """A server that is ready; stopped as a container is, by SIGTERM."""
        port = free_port()
        words = self.serve_words(size or self.options.size)
        command = [sys.executable, "-m", "deltaserve.server.cli", "serve", *words]
        command += [*self.options.serve_flags.split(), *flags, "--port", str(port)]
        began = time.monotonic()
        with self.out.with_name(f"{self.out.stem}.{name}.server.log").open("wb") as log:
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment(), stdout=log, stderr=subprocess.STDOUT
            )
            try:
                served = Served(self, name, f"http://127.0.0.1:{port}", process.pid)
                served.wait_ready(process)
                self.results[f"{name} start"] = {"command": command[1:], "s": elapsed(began)}
                yield served
            finally:
                process.send_signal(signal.SIGTERM)
                try:
                    status = process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    status = process.wait()
                if status != 0:
                    self.failures.append(f"{name}: the server ended with {status}")


@dataclass
class Served:
    suite: Suite
    name: str
    url: str
    pid: int

    def wait_ready(self, process: subprocess.Popen[bytes]) -> None:
        end = time.monotonic() + START_SECONDS
        while process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError, urllib.error.HTTPError):
                self.get("/ready")
                return
            time.sleep(0.05)
        raise RuntimeError(f"{self.name}: the server was not ready (see its log)")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as response:
            return str(response.read().decode())

    def metric(self, name: str) -> float:
        lines = self.get("/metrics").splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name))

    def run(self, tool: str, *words: str) -> dict[str, Any]:
        """A tool against this server, its JSON."""
        result = self.suite.out.with_name(f"{self.suite.out.stem}.{self.name}.json")
        result.unlink(missing_ok=True)
        command = [sys.executable, "-m", f"tools.{tool}", "--url", self.url, *words]
        with result.with_suffix(".log").open("ab") as log:
            status = subprocess.call(
                [*command, "--json", str(result)], cwd=ROOT, stdout=log, stderr=subprocess.STDOUT
            )
        if status != 0:
            self.suite.failures.append(f"{self.name}: {tool} ended with {status}")
        return json.loads(result.read_text()) if result.exists() else {"cells": []}


def environment() -> dict[str, str]:
    """In which `deltaserve` and `tools` can be imported, as here."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def elapsed(began: float) -> float:
    return round(time.monotonic() - began, 2)


def table(suite: Suite) -> None:
    quick = ["--quick"] if suite.options.quick else []
    recheck = ["--recheck", str(suite.options.recheck)]
    with suite.server("table") as server:
        cells = server.run("bench_serving", "--table", *quick, *recheck, *suite.options.cells)
    suite.results["table"] = cells
    for cell in cells["cells"]:
        found = cell.get("recheck")
        if found and found["equal"] != found["requests"]:
            suite.failures.append(f"table: {cell['name']}: outputs under load differ: {found}")


def equal(suite: Suite) -> None:
    """The first run of each cell has the same prompts on every server."""
    found: dict[str, list[list[str]]] = {}
    few = suite.options.few_blocks
    for name, flags in (
        ("graphs", ()),
        ("no graphs", ("--no-cuda-graph",)),
        ("few blocks", ("--kv-cache-memory", few)),
    ):
        with suite.server(name.replace(" ", "_"), *flags) as server:
            words = ["--table", "--quick", "--cells", *LOADED_CELLS]
            cells = server.run("bench_serving", *words)["cells"]
            preempted = server.metric("vllm:num_preemptions")
        suite.results[name] = {"cells": cells, "preemptions": preempted}
        found[name] = [cell["runs"][0]["hashes"] for cell in cells]
        if name == "few blocks" and preempted == 0:
            suite.failures.append(f"equal: nothing was preempted with {few} of KV cache")
    for name, hashes in found.items():
        if not hashes or any("" in run for run in hashes) or hashes != found["graphs"]:
            suite.failures.append(f"equal: outputs of '{name}' differ from those with graphs")


def loads(suite: Suite) -> None:
    checks(suite, "loads", "mixed", "overload", "--max-gap", "25")


def soak(suite: Suite) -> None:
    checks(suite, "soak", "soak", "--seconds", str(suite.options.soak_seconds))


def checks(suite: Suite, name: str, *words: str) -> None:
    with suite.server(name) as server:
        only = ["--pid", str(server.pid), "--only", *words]
        suite.results[name] = server.run("server_checks", *only)


def sizes(suite: Suite) -> None:
    for size in ("9B", "27B"):
        with suite.server(size, size=size) as server:
            words = ["--table", "--quick", "--cells", "c=1 1024/128", "c=64 1024/128"]
            suite.results[size] = server.run("bench_serving", *words)


def engine(suite: Suite) -> None:
    path = suite.out.with_name(f"{suite.out.stem}.engine.json")
    streams, prompt, output = ALONE
    words = ["--concurrency", *map(str, streams)]
    words += ["--input-len", str(prompt), "--output-len", str(output)]
    command = [sys.executable, "-m", "tools.bench_engine", *suite.serve_words(suite.options.size)]
    command += [*words, "--rounds", str(suite.options.rounds), "--json", str(path)]
    with path.with_suffix(".log").open("wb") as log:
        status = subprocess.call(
            command, cwd=ROOT, env=environment(), stdout=log, stderr=subprocess.STDOUT
        )
    if status != 0:
        suite.failures.append(f"engine: bench_engine ended with {status}")
        return
    found = json.loads(path.read_text())
    suite.results["engine"] = found
    served = {
        cell["name"]: cell["median"]["output_tokens_per_s"]
        for cell in suite.results.get("table", {"cells": []})["cells"]
    }
    for alone in found:
        name = f"c={alone['concurrency']} {prompt}/{output}"
        if name in served:
            alone["served_share"] = served[name] / alone["output_tokens_per_s"]
            if alone["served_share"] < suite.options.min_share:
                suite.failures.append(f"engine: {name}: {alone['served_share']:.3f} of it served")


PARTS: dict[str, Callable[[Suite], None]] = {
    "table": table,
    "equal": equal,
    "loads": loads,
    "soak": soak,
    "sizes": sizes,
    "engine": engine,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True)
    add("--size", choices=SIZES, default="4B")
    add("--model-path", type=Path, help="in place of random weights")
    add("--only", nargs="+", choices=list(PARTS), default=list(PARTS))
    add("--serve-flags", default="", help="more flags of every server, in one word")
    add("--quick", action="store_true", help="of table: fewer requests, one run")
    add("--recheck", type=int, default=64, help="of table: requests of a cell to repeat alone")
    add("--cells", nargs="+", default=[], help="of table: these alone")
    add("--few-blocks", default=FEW_BLOCKS, help="of equal: KV cache that forces preemption")
    add("--rounds", type=int, default=4, help="of engine: requests per stream")
    add("--min-share", type=float, default=0.9)
    add("--soak-seconds", type=float, default=300.0)
    options = parser.parse_args(arguments)
    options.cells = ["--cells", *options.cells] if options.cells else []
    make_importable()
    out = options.out.resolve()
    out.parent.mkdir(parents=True, exist_ok=True)
    model_path = options.model_path.resolve() if options.model_path else None
    with tempfile.TemporaryDirectory() as folder:
        suite = Suite(out, Path(folder), model_path, options)
        for name in options.only:
            began, before = time.monotonic(), len(suite.failures)
            try:
                PARTS[name](suite)
            except (OSError, RuntimeError, ValueError, KeyError, IndexError) as error:
                suite.failures.append(f"{name}: {type(error).__name__}: {error}")
            outcome = "; ".join(suite.failures[before:]) or "ok"
            print(f"{name:8s} {elapsed(began):7.1f} s  {outcome}", flush=True)
            found = {"failures": suite.failures, "results": suite.results}
            out.write_text(json.dumps(found) + "\n")
    return 1 if suite.failures else 0


if __name__ == "__main__":
    sys.exit(main())
