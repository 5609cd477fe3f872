"""What prefix caching gains and costs, on the engine without HTTP, and that it changes no bit.

    python -m tools.bench_prefix_cache --size 4B [--only bits sighting chat shared cost] [--out F]
    python -m tools.bench_prefix_cache --model-path models/demo --scale 0.1

Random weights of a true size, or a checkpoint. `--scale` shortens prompts, for the CPU.

    bits      sha256 of every sampled logits row and all ids, against the cache turned off: prompts
              that share 63 .. 4,000 tokens, cold, warm, and all at once; and log-probabilities of
              prompts, which read nothing from the cache, one by one and all at once
    sighting  TTFT of the 1st, 2nd and 3rd prompt that begins with the same 4,000 tokens
    chat      8 turns, 1,000 tokens of system prompt, 200 a turn: share of the previous prompt found
    shared    64 clients with one system prompt of 2,000 tokens: output tokens/s, on and off
    cost      prompts that share nothing, 1,024/128 by 16: output tokens/s, on and off, in turns

Exits with 1 if a bit differs. Off is the same engine with a scheduler that has no snapshots.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import random
import statistics
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tools.gpu_check import make_importable

Prompt = tuple[int, ...]
Row = dict[str, Any]


class Bench:
    """One loaded engine, with the cache on or off."""

    def __init__(self, args: argparse.Namespace) -> None:
        from deltaserve.engine.config import EngineConfig
        from deltaserve.engine.llm_engine import LLMEngine

        config = EngineConfig(
            args.model_path or dummy_folder(args.size),
            load_format="safetensors" if args.model_path else "dummy",
            max_num_seqs=args.max_num_seqs,
            snapshot_interval=args.snapshot_interval,
        )
        self.engine = LLMEngine(config)
        self.scale = args.scale
        self.rng = random.Random(args.seed)

    def set_cache(self, on: bool) -> None:
        """Empties it, too."""
        from deltaserve.engine.scheduler import Scheduler

        assert not self.engine.has_work
        snapshots = self.engine.capacity.num_snapshots if on else 0
        capacity = dataclasses.replace(self.engine.capacity, num_snapshots=snapshots)
        self.engine._scheduler = Scheduler(capacity)

    def ids(self, count: int) -> Prompt:
        """Random ones; `count` is scaled."""
        limit = self.engine.vocab_limit
        return tuple(self.rng.randrange(limit) for _ in range(max(1, round(count * self.scale))))

    def run(
        self, prompts: list[Prompt], concurrency: int, output_len: int, **options: Any
    ) -> list[Row]:
        """Of each prompt: ids, ttft (ms), cached (tokens), entries (of its log-probabilities); and
        `seconds` of all in the first."""
        from deltaserve.engine.sampling_params import SamplingParams

        engine = self.engine
        params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True, **options)
        waiting, rows = deque(enumerate(prompts)), [Row() for _ in prompts]
        num_open, begin = 0, time.perf_counter()
        while waiting or engine.has_work:
            while waiting and num_open < concurrency:
                number, prompt = waiting.popleft()
                engine.add_request(str(number), prompt, params)
                rows[number] = {"ids": [], "added": time.perf_counter()}
                num_open += 1
            for output in engine.step():
                row = rows[int(output.request_id)]
                if "ttft" not in row:
                    row["ttft"] = 1e3 * (time.perf_counter() - row["added"])
                    row["cached"] = output.num_cached_tokens
                    row["entries"] = output.prompt_logprobs
                row["ids"] += output.token_ids
                num_open -= output.finish_reason is not None
        rows[0]["seconds"] = time.perf_counter() - begin
        return rows


def bits(bench: Bench) -> Iterator[Row]:
    hashes: dict[tuple[str, int], str] = {}

    def note(request_id: str, position: int, row: Any) -> None:
        host = row.get() if hasattr(row, "get") else row
        hashes[request_id, position] = hashlib.sha256(host.tobytes()).hexdigest()

    prompts: list[Prompt] = []
    for shared in (63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 4000):
        prefix = bench.ids(shared)
        prompts += [prefix + bench.ids(own) for own in (5, 70, 200, 1100)] + [prefix]

    def results(concurrency: int) -> tuple[dict[tuple[str, int], str], list[list[int]], int]:
        hashes.clear()
        rows = bench.run(prompts, concurrency, 4)
        return dict(hashes), [row["ids"] for row in rows], sum(row["cached"] for row in rows)

    bench.engine._runner._logits_hook = note
    bench.set_cache(False)
    expected = results(1)[:2]
    bench.set_cache(True)
    for name, concurrency in (("cold", 1), ("warm", 1), ("warm, together", 64)):
        found, ids, cached = results(concurrency)
        wrong = sum(found[key] != value for key, value in expected[0].items())
        wrong += sum(a != b for a, b in zip(ids, expected[1], strict=True))
        yield {
            "what": f"bits {name}",
            "rows": len(expected[0]),
            "differ": wrong,
            "hit tokens": cached,
            "of": sum(map(len, prompts)),
        }
    bench.engine._runner._logits_hook = None
    alone, together = (
        [row["entries"] for row in bench.run(prompts[::3], concurrency, 0, prompt_logprobs=2)]
        for concurrency in (1, 64)
    )
    yield {
        "what": "prompt logprobs, together",
        "rows": sum(map(len, alone)),
        "differ": sum(
            a != b for x, y in zip(alone, together, strict=True) for a, b in zip(x, y, strict=True)
        ),
    }


def sighting(bench: Bench) -> Iterator[Row]:
    bench.set_cache(True)
    times: list[list[float]] = [[], [], []]
    cached: list[list[int]] = [[], [], []]
    for number in range(9):
        prefix = bench.ids(4000)
        for nth in range(3):
            (row,) = bench.run([prefix + bench.ids(64)], 1, 2)
            if number > 0:  # the first warms up
                times[nth].append(row["ttft"])
                cached[nth].append(row["cached"])
    for nth in range(3):
        ttft = statistics.median(times[nth])
        yield {
            "what": f"sighting {nth + 1}",
            "ttft ms": ttft,
            "of first": ttft / statistics.median(times[0]),
            "cached": statistics.median(cached[nth]),
        }


def chat(bench: Bench) -> Iterator[Row]:
    bench.set_cache(True)
    prompt, previous = bench.ids(1000) + bench.ids(200), 0
    for turn in range(1, 9):
        (row,) = bench.run([prompt], 1, max(1, round(100 * bench.scale)))
        share = row["cached"] / previous if previous else 0.0
        yield {
            "what": f"chat turn {turn}",
            "prompt": len(prompt),
            "cached": row["cached"],
            "of previous prompt": share,
            "ttft ms": row["ttft"],
        }
        previous = len(prompt)
        prompt = (*prompt, *row["ids"], *bench.ids(100))


def throughput(bench: Bench, on: bool, prompts: list[Prompt], clients: int, out: int) -> Row:
    bench.set_cache(on)
    rows = bench.run(prompts, clients, out)
    return {
        "what": "on" if on else "off",
        "out tok/s": len(prompts) * out / rows[0]["seconds"],
        "ttft ms": statistics.median(row["ttft"] for row in rows),
        "hit share": sum(row["cached"] for row in rows) / sum(map(len, prompts)),
    }


def shared(bench: Bench) -> Iterator[Row]:
    system, out = bench.ids(2000), max(1, round(64 * bench.scale))
    prompts = [system + bench.ids(100) for _ in range(128)]
    throughput(bench, False, prompts[:8], 8, out)
    for on in (False, True):
        row = throughput(bench, on, prompts, 64, out)
        yield {**row, "what": f"shared system prompt, cache {row['what']}"}


def cost(bench: Bench) -> Iterator[Row]:
    out = max(1, round(128 * bench.scale))
    found: dict[bool, list[Row]] = {False: [], True: []}
    throughput(bench, True, [bench.ids(1024) for _ in range(16)], 16, out)
    for on in (False, True, True, False, False, True):
        prompts = [bench.ids(1024) for _ in range(32)]
        found[on].append(throughput(bench, on, prompts, 16, out))
    speed = {on: statistics.median(r["out tok/s"] for r in rows) for on, rows in found.items()}
    for on, rows in found.items():
        yield {
            "what": f"no reuse, cache {'on' if on else 'off'}",
            "out tok/s": speed[on],
            "each": [round(row["out tok/s"], 1) for row in rows],
            "of off": speed[on] / speed[False],
            "ttft ms": statistics.median(row["ttft ms"] for row in rows),
        }


CELLS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    "bits": bits,
    "sighting": sighting,
    "chat": chat,
    "shared": shared,
    "cost": cost,
}


def dummy_folder(size: str) -> str:
    """A folder with the config of a true size and a made-up tokenizer."""
    from tools.make_dummy_model import write_dummy_model

    folder = Path(tempfile.mkdtemp(prefix=f"dummy-{size}-"))
    write_dummy_model(folder, size)
    return str(folder)


def line(row: Row) -> str:
    def text(value: Any) -> str:
        return f"{value:.3f}" if isinstance(value, float) else str(value)

    return f"{row['what']:<36}" + "  ".join(f"{k} {text(v)}" for k, v in row.items() if k != "what")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="4B")
    parser.add_argument("--model-path")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--snapshot-interval", type=int, default=1024)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", nargs="*", choices=CELLS, default=list(CELLS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    make_importable()
    bench = Bench(args)
    print(f"{bench.engine.capacity}")
    rows = []
    for name in args.only:
        for row in CELLS[name](bench):
            rows.append(row)
            print(line(row), flush=True)
    bench.engine.close()
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))
    sys.exit(any(row.get("differ") for row in rows))


if __name__ == "__main__":
    main()
