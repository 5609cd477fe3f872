"""Benchmarks any OpenAI completions server: times, throughput and the equality of its outputs.

    python -m tools.bench_serving --concurrency 1 16 64 --input-len 1024 --output-len 128
    python -m tools.bench_serving --qps 1 4 16 --dataset shared-prefix --prefix-len 896
    python -m tools.bench_serving --table [--quick] --json result.json --plots plots
    python -m tools.bench_serving --compare before.json after.json

Requests are streamed, with a fixed number of output tokens (`ignore_eos`), greedy unless
--temperature says otherwise. Each cell is warmed up and run several times (--runs), each time with
prompts of its own, so that no run finds those of another in a prefix cache. "same output": some
requests of a cell, repeated one at a time, against what they gave under load. Times in ms. TTFT: to
the first text or token; TPOT: mean of the other tokens of a request; ITL: gaps between events.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tools.bench_answers import Outcome, read_outcome
from tools.bench_cells import TABLE, Budget
from tools.bench_client import Client
from tools.bench_data import FilePrompts, Prompts, RandomPrompts
from tools.bench_load import PATH, Load, run
from tools.bench_report import (
    FORMAT,
    budget_table,
    comparison_table,
    over_runs,
    read_object,
    read_result,
    result_table,
    summarise,
)

WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Job:
    """One cell to measure."""

    name: str
    load: Load
    prompts: Prompts
    max_tokens: int
    requests: int
    recheck: int = 0
    budgets: tuple[Budget, ...] = ()


class Bench:
    """A server, and what all requests to it have in common."""

    def __init__(self, client: Client, fields: dict[str, Any], seed: int) -> None:
        self._client = client
        self._fields = fields
        self._seed = seed

    async def find_hash(self, wanted: str) -> str:
        """ "ids" where the server hands them out, else "text"; raises ValueError for "ids" where
        it does not."""
        if wanted == "text":
            return wanted
        self._fields["return_token_ids"] = True
        outcome = await self._one(self._body([0], 1))
        if outcome.error is None and outcome.hash_of == "token ids":
            return "ids"
        if wanted == "ids":
            raise ValueError(f"the server gives no token ids: {outcome.error}")
        del self._fields["return_token_ids"]
        return "text"

    async def measure(self, job: Job, runs: int) -> dict[str, Any]:
        """Warm-up, runs, and the repetition of the first run's requests one at a time."""
        await self._warm_up(job)
        rows = []
        for number in range(runs):
            bodies, wanted = self._bodies(job, number)
            outcomes, times = await run(self._client, bodies, job.load, f"{self._seed} {number}")
            rows.append(summarise(outcomes, wanted, times))
        median, worst = over_runs(rows)
        cell = {
            "name": job.name,
            "load": asdict(job.load),
            "median": median,
            "worst": worst,
            "budgets": [asdict(budget) for budget in job.budgets],
            "runs": rows,
        }
        if job.recheck:
            cell["recheck"] = await self._recheck(job, rows[0]["hashes"])
        return cell

    async def _warm_up(self, job: Job) -> None:
        """As many requests as run at once, of the cell's prompt lengths."""
        count = min(job.load.concurrency or 8, job.requests)
        prompts = [
            job.prompts.prompt(f"{self._seed} {job.name} warm-up", index) for index in range(count)
        ]
        bodies = [self._body(p.content, min(WARM_UP_TOKENS, job.max_tokens)) for p in prompts]
        await run(self._client, bodies, Load(concurrency=count), "warm-up")

    async def _recheck(self, job: Job, hashes: Sequence[str]) -> dict[str, int]:
        bodies, _ = self._bodies(job, 0)
        count = min(job.recheck, len(bodies))
        alone = [await self._one(body) for body in bodies[:count]]
        equal = sum(
            o.error is None and o.output_hash == known
            for o, known in zip(alone, hashes, strict=False)
        )
        return {"requests": count, "equal": equal}

    async def _one(self, body: bytes) -> Outcome:
        return read_outcome(await self._client.post(PATH, body))

    def _bodies(self, job: Job, number: int) -> tuple[list[bytes], list[int]]:
        seed = f"{self._seed} {job.name} {number}"
        prompts = [job.prompts.prompt(seed, index) for index in range(job.requests)]
        wanted = [p.max_tokens or job.max_tokens for p in prompts]
        bodies = [self._body(p.content, n) for p, n in zip(prompts, wanted, strict=True)]
        return bodies, wanted

    def _body(self, prompt: list[int] | str, max_tokens: int) -> bytes:
        body = {
            **self._fields,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(body).encode()


def main(arguments: list[str] | None = None) -> int:
    args = _arguments(arguments)
    try:
        if args.plots is not None and importlib.util.find_spec("matplotlib") is None:
            raise ValueError("--plots needs matplotlib (pip install '.[bench]')")
        if args.compare:
            results = [(Path(name).stem, read_result(name)) for name in args.compare]
            print(comparison_table(results))
            _plot(results, args.plots)
            return 0
        jobs = _jobs(args)
        result = _run(_measure(args, jobs))
    except (ValueError, OSError) as error:
        print(f"bench_serving: {error}", file=sys.stderr)
        return 2
    print(result_table(result))
    budgets = budget_table(result)
    if budgets is not None:
        print(f"\n{budgets}")
    _plot([("", result)], args.plots)
    bad = [
        cell["name"]
        for cell in result["cells"]
        if cell["median"]["failed"]
        or cell["median"]["short"]
        or ("recheck" in cell and cell["recheck"]["equal"] < cell["recheck"]["requests"])
    ]
    if bad:
        print(f"failed, short or unequal outputs: {', '.join(bad)}", file=sys.stderr)
    return 1 if bad else 0


async def _measure(args: argparse.Namespace, jobs: list[Job]) -> dict[str, Any]:
    """Writes --json after each cell, so that what was measured survives an interruption."""
    model = args.model or _get(args, "/v1/models")["data"][0]["id"]
    fields = {"model": model, "temperature": args.temperature, "ignore_eos": True}
    fields |= read_object(args.extra_body, "--extra-body")
    if args.temperature > 0:
        fields.setdefault("seed", args.seed)
    client = Client(args.url, api_key=args.api_key, timeout=args.timeout)
    bench = Bench(client, fields, args.seed)
    result: dict[str, Any] = {
        "format": FORMAT,
        "began": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "model": model,
        "server": _version(args),
        "hash": await bench.find_hash(args.hash),
        "command": sys.argv[1:],
        "cells": [],
    }
    for job in jobs:
        began = time.monotonic()
        cell = await bench.measure(job, args.runs)
        result["cells"].append(cell)
        if args.json:
            Path(args.json).write_text(json.dumps(result))
        print(f"{job.name}: {time.monotonic() - began:.1f} s", file=sys.stderr, flush=True)
        for error in cell["runs"][0]["errors"]:
            print(f"{job.name}: {error}", file=sys.stderr)
    client.close()
    return result


def _jobs(args: argparse.Namespace) -> list[Job]:
    if args.table:
        unknown = set(args.cells or ()) - {n for c in TABLE for n in (c.name, str(c.load))}
        if unknown:
            raise ValueError(f"--cells: the table has no {', '.join(sorted(unknown))}")
        return [
            Job(
                cell.name,
                cell.load,
                RandomPrompts(cell.input_len, *args.token_ids),
                cell.output_len,
                args.requests or (cell.quick if args.quick else cell.requests),
                args.recheck if (cell.load.concurrency or 0) >= 64 else 0,
                cell.budgets,
            )
            for cell in TABLE
            if not args.cells or not {cell.name, str(cell.load)}.isdisjoint(args.cells)
        ]
    loads = [Load(concurrency=count) for count in args.concurrency]
    loads += [Load(qps=rate) for rate in args.qps]
    prompts, what = _prompts(args)
    jobs = []
    for load in loads or [Load(concurrency=1)]:
        requests = args.requests or (4 * load.concurrency if load.concurrency else 64)
        name = f"{load} {what}/{args.output_len}"
        jobs.append(Job(name, load, prompts, args.output_len, requests, args.recheck))
    return jobs


def _prompts(args: argparse.Namespace) -> tuple[Prompts, str]:
    if args.dataset == "jsonl":
        if args.file is None:
            raise ValueError("--dataset jsonl needs --file")
        return FilePrompts.read(args.file), args.file.stem
    prefix = args.prefix_len if args.dataset == "shared-prefix" else 0
    low, high = args.token_ids
    prompts = RandomPrompts(
        args.input_len, low, high, args.text, prefix, args.num_prefixes if prefix else 1
    )
    return prompts, f"{args.input_len}" + (f" ({prefix} shared)" if prefix else "")


def _run(work: Coroutine[Any, Any, dict[str, Any]]) -> dict[str, Any]:
    """On uvloop where it is installed: the client then takes less of the machine."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


def _get(args: argparse.Namespace, path: str) -> Any:
    request = urllib.request.Request(args.url.rstrip("/") + path)
    if args.api_key:
        request.add_header("Authorization", f"Bearer {args.api_key}")
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.load(response)


def _version(args: argparse.Namespace) -> Any:
    try:
        return _get(args, "/version")
    except (OSError, ValueError):
        return None


def _plot(results: list[tuple[str, dict[str, Any]]], folder: Path | None) -> None:
    if folder is not None:
        from tools.bench_plots import plot_results

        for path in plot_results(results, folder):
            print(path)


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000")
    add("--api-key")
    add("--model", help="default: the first of /v1/models")
    add("--concurrency", type=int, nargs="+", default=[], help="streams")
    add("--qps", type=float, nargs="+", default=[], help="requests a second, Poisson arrivals")
    add("--requests", type=int, help="of a run (default: 4 a stream, 64 with --qps, a cell's own)")
    add("--runs", type=int, help="of each cell (default: 3, 1 with --quick)")
    add("--dataset", choices=("random", "shared-prefix", "jsonl"), default="random")
    add("--file", type=Path, help="of --dataset jsonl: a prompt a line")
    add("--input-len", type=int, default=1024, help="tokens, or words with --text")
    add("--output-len", type=int, default=128)
    add("--prefix-len", type=int, default=512)
    add("--num-prefixes", type=int, default=4)
    add("--text", action="store_true", help="words instead of token ids")
    add("--token-ids", type=int, nargs=2, default=[0, 1000], metavar=("LOW", "HIGH"))
    add("--temperature", type=float, default=0.0)
    add("--extra-body", default="{}", metavar="JSON", help="more fields of every request")
    add("--seed", type=int, default=0)
    add("--hash", choices=("auto", "ids", "text"), default="auto", help="of what outputs are")
    add("--recheck", type=int, default=0, help="requests of a cell (--table: of c >= 64) to repeat")
    add("--timeout", type=float, default=600.0, help="seconds, of one request")
    add("--table", action="store_true", help="the cells that have budgets")
    add("--cells", nargs="+", help="of --table: by load, as c=64, or by name")
    add("--quick", action="store_true", help="of --table: fewer requests, one run")
    add("--json", metavar="FILE")
    add("--plots", type=Path, metavar="DIR", help="PNG files there (needs matplotlib)")
    add("--compare", nargs="+", metavar="FILE", help="result files side by side; no server")
    args = parser.parse_args(arguments)
    if args.runs is None:
        args.runs = 1 if args.quick else 3
    if args.runs < 1 or (args.requests is not None and args.requests < 1):
        parser.error("--runs and --requests are 1 or more")
    return args


if __name__ == "__main__":
    sys.exit(main())
