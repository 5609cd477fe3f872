"""Loads that a server has to stand, and what must hold during and after each.

    python -m tools.server_checks --only mixed overload soak --pid PID --json checks.json

mixed:    streams that decode while long cold prompts arrive: the gaps between their tokens.
overload: waves of requests at once: each completes in full or is refused with 429 or 400.
soak:     random prompts, lengths and aborts for --seconds.

After each, nothing runs and no block or slot is in use; the same request gives the same output as
before; and the memory of the server's processes (--pid, with its children) and of the GPU is what
it was (for overload: after a first one like its last wave), to --memory-slack MiB (the caches of
the CPU backend become resident as they are first used: give it their size there). A check in which
nothing was tried fails. Exits with 1 if anything fails, 2 with a line if it cannot be tried.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench_answers import Outcome, read_outcome
from tools.bench_client import Client
from tools.bench_data import RandomPrompts
from tools.bench_load import PATH
from tools.bench_report import distribution

# (requests, prompt tokens, output tokens) at once
WAVES = ((512, 1024, 32), (70, 8704, 16), (1024, 16, 16))
LONG_PROMPTS = (4096, 8192, 16384)
REFUSALS = ("429", "400")
GAUGES = (
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "deltaserve:state_slots_in_use",
)


class Server:
    """A server under load."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args
        self._low, self._high = args.token_ids
        self.url = args.url.rstrip("/")
        with urllib.request.urlopen(f"{self.url}/v1/models", timeout=10) as response:
            model = json.load(response)["data"][0]
        self.model, self.max_model_len = model["id"], int(model["max_model_len"])
        self.client = Client(self.url)

    async def complete(self, seed: str, prompt_len: int, max_tokens: int) -> Outcome:
        prompt = RandomPrompts(prompt_len, self._low, self._high).prompt(seed, 0).content
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return read_outcome(await self.client.post(PATH, json.dumps(body).encode()))

    def gauges(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as response:
            lines = response.read().decode().splitlines()
        values: dict[str, float] = {}
        for line in lines:
            name = line.partition("{")[0].partition(" ")[0]
            if name in GAUGES:
                values[name] = float(line.rpartition(" ")[2])
        return values

    async def idle(self) -> bool:
        """Whether nothing is left of any request, given some seconds."""
        for _ in range(100):
            if not any((await asyncio.to_thread(self.gauges)).values()):
                return True
            await asyncio.sleep(0.1)
        return False

    def memory_mib(self) -> dict[str, float]:
        """Of the server's processes, and of the GPU."""
        found: dict[str, float] = {}
        if self._args.pid is not None:
            found["host"] = sum(_resident_mib(pid) for pid in _family(self._args.pid))
            if not found["host"]:
                raise ValueError(f"--pid {self._args.pid}: there is no such process")
        if shutil.which("nvidia-smi"):
            command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
            output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            found["gpu"] = float(output.split()[0])
        return found


async def mixed(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    """The streams' gaps from the first long prompt to the end of the last."""
    streams = [
        asyncio.create_task(server.complete(f"mixed {i}", 128, args.mixed_tokens)) for i in range(4)
    ]
    await asyncio.sleep(args.settle)
    lengths = [n for n in (*LONG_PROMPTS, *LONG_PROMPTS) if n + 8 <= server.max_model_len]
    long_ones = [await server.complete(f"long {i}", n, 4) for i, n in enumerate(lengths)]
    outlived = sum(not stream.done() for stream in streams)
    outcomes = await asyncio.gather(*streams)
    gaps = distribution(gap for outcome in outcomes for gap in outcome.gaps)
    failures = _faults([*outcomes, *long_ones], ())
    if not lengths:
        failures.append(f"no long prompt fits a context of {server.max_model_len} tokens")
    if outlived < len(streams):
        failures.append("the streams ended before the long prompts did: --mixed-tokens is too low")
    if gaps is not None and args.max_gap and gaps["p99"] > args.max_gap:
        failures.append(f"99 % of the gaps are up to {gaps['p99']:.1f} ms")
    ttft = [round(outcome.ttft, 1) for outcome in long_ones]
    return {"gaps_ms": gaps, "prompts": lengths, "ttft_ms": ttft, "failures": failures}


async def overload(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    waves, failures = [], []
    for count, prompt_len, max_tokens in scaled(args.scale):
        began = time.monotonic()
        outcomes = await wave(server, count, prompt_len, max_tokens)
        refused = sum(o.error is not None and o.error.startswith(REFUSALS) for o in outcomes)
        failures += _faults(outcomes, REFUSALS)
        failures += [
            f"{o.output_tokens} of {max_tokens} tokens"
            for o in outcomes
            if o.error is None and o.output_tokens != max_tokens
        ]
        seconds = round(time.monotonic() - began, 1)
        waves.append({"requests": count, "prompt": prompt_len, "refused": refused, "s": seconds})
    return {"waves": waves, "failures": failures[:10]}


async def wave(server: Server, count: int, prompt_len: int, max_tokens: int) -> list[Outcome]:
    name = f"wave {prompt_len}"
    requests = (server.complete(f"{name} {i}", prompt_len, max_tokens) for i in range(count))
    return await asyncio.gather(*requests)


def scaled(scale: float) -> list[tuple[int, int, int]]:
    return [(max(1, int(n * scale)), max(1, int(length * scale)), out) for n, length, out in WAVES]


async def soak(server: Server, args: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(args.seed)
    counts = {"completed": 0, "aborted": 0}
    failures: list[str] = []
    memory: list[dict[str, float]] = []
    end = time.monotonic() + args.seconds

    async def stream(number: int) -> None:
        index = 0
        while time.monotonic() < end:
            index += 1
            prompt_len = int(2 ** rng.uniform(0, 11)) if rng.random() < 0.95 else 6000
            prompt_len = min(prompt_len, server.max_model_len - 260)
            work = server.complete(f"soak {number} {index}", prompt_len, rng.randrange(1, 256))
            # A third are given up at some time: queued, in prefill, or while they decode.
            limit = rng.expovariate(2.0) if rng.random() < 1 / 3 else None
            try:
                outcome = await asyncio.wait_for(work, limit)
            except TimeoutError:
                counts["aborted"] += 1
                continue
            counts["completed"] += 1
            failures.extend(_faults([outcome], REFUSALS))

    streams = [asyncio.create_task(stream(number)) for number in range(args.streams)]
    while time.monotonic() < end:
        await asyncio.sleep(min(10.0, args.seconds / 4))
        memory.append(await asyncio.to_thread(server.memory_mib))
    await asyncio.gather(*streams)
    if not counts["completed"]:
        failures.append("no request was completed: more --seconds or --streams")
    return {**counts, "memory_mib": memory, "failures": failures[:10]}


CHECKS = {"mixed": mixed, "overload": overload, "soak": soak}


async def run_checks(args: argparse.Namespace) -> dict[str, Any]:
    server = Server(args)
    known = await server.complete("known", min(200, server.max_model_len // 2), 32)
    results: dict[str, Any] = {}
    for name in args.only:
        if name == "overload":  # an interpreter keeps some of the most it has held at once
            await wave(server, *scaled(args.scale)[-1])
        before = server.memory_mib()
        result = await CHECKS[name](server, args)
        failures = result["failures"]
        if not await server.idle():
            failures.append(f"still in use: {server.gauges()}")
        after = server.memory_mib()
        failures += [
            f"{kind} memory went from {size:.0f} to {after[kind]:.0f} MiB"
            for kind, size in before.items()
            if after[kind] > size + args.memory_slack
        ]
        again = await server.complete("known", min(200, server.max_model_len // 2), 32)
        if again.error is not None or again.output_hash != known.output_hash:
            failures.append(f"a known request gives something else: {again.error}")
        results[name] = {**result, "memory_before": before, "memory_after": after}
        print(f"{name}: {json.dumps(results[name])}", flush=True)
    server.client.close()
    return results


def _faults(outcomes: Sequence[Outcome], allowed: tuple[str, ...]) -> list[str]:
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    return [error for error in errors if not (allowed and error.startswith(allowed))]


def _family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _family(int(child))
    return found


def _resident_mib(pid: int) -> float:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) / 1024
    return 0.0


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--url", default="http://127.0.0.1:8000")
    add("--only", nargs="+", choices=list(CHECKS), default=list(CHECKS))
    add("--pid", type=int, help="of the server, to watch its memory")
    add("--memory-slack", type=float, default=64.0, metavar="MIB")
    add("--seconds", type=float, default=300.0, help="of soak")
    add("--streams", type=int, default=48, help="of soak")
    add("--mixed-tokens", type=int, default=2000, help="of each stream of mixed")
    add("--settle", type=float, default=1.0, help="seconds before the first long prompt")
    add("--max-gap", type=float, help="ms, of mixed: the 99th percentile may not exceed it")
    add("--scale", type=float, default=1.0, help="of the counts and prompts of overload")
    add("--token-ids", type=int, nargs=2, default=[0, 1000], metavar=("LOW", "HIGH"))
    add("--seed", type=int, default=0)
    add("--json", metavar="FILE")
    args = parser.parse_args(arguments)
    try:
        results = asyncio.run(run_checks(args))
        if args.json:
            Path(args.json).write_text(json.dumps(results, indent=1))
    except (ValueError, OSError) as error:
        print(f"server_checks: {error}", file=sys.stderr)
        return 2
    failed = {name: result["failures"] for name, result in results.items() if result["failures"]}
    print("\n".join(f"FAILED {name}: {'; '.join(f)}" for name, f in failed.items()) or "all hold")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
