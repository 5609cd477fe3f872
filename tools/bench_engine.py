"""Times the engine without HTTP: decode and prefill rates, TTFT, step and host time.

    python -m tools.bench_engine --model-path models/demo --concurrency 1 16

Random token ids as prompts, greedy, fixed output lengths, each cell after a warm-up of its own
shape. "host" is what a step costs the engine's thread beside waiting for the device; on the CPU
device it competes with the computation for the interpreter. Prints a table, and JSON with --json.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import deque
from dataclasses import asdict, dataclass
from typing import Any

from deltaserve.engine.config import EngineConfig
from deltaserve.engine.llm_engine import LLMEngine
from deltaserve.engine.sampling_params import SamplingParams


@dataclass(frozen=True)
class Cell:
    """One measurement. Times in ms."""

    concurrency: int
    input_len: int
    output_len: int
    num_requests: int
    output_tokens_per_s: float
    total_tokens_per_s: float
    ttft_p50: float
    tpot_p50: float
    step_p50: float
    host_p50: float
    host_p99: float
    num_steps: int


def run_cell(
    engine: LLMEngine,
    concurrency: int,
    input_len: int,
    output_len: int,
    num_requests: int,
    params: dict[str, Any],
) -> Cell:
    rng = random.Random(f"{concurrency} {output_len}")  # another cell's would be in the cache
    prompts = deque(
        [rng.randrange(engine.vocab_limit) for _ in range(input_len)] for _ in range(num_requests)
    )
    sampling = SamplingParams(max_tokens=output_len, ignore_eos=True, **params)
    added: dict[str, float] = {}
    first: dict[str, float] = {}
    ttft: list[float] = []
    tpot: list[float] = []
    steps: list[float] = []
    hosts: list[float] = []
    start = time.perf_counter()
    while prompts or engine.has_work:
        while prompts and len(added) < concurrency:
            name = f"{concurrency}-{len(prompts)}"
            engine.add_request(name, prompts.popleft(), sampling)
            added[name] = time.perf_counter()
        host, begin = engine.stats().host_seconds, time.perf_counter()
        outputs = engine.step()
        now = time.perf_counter()
        steps.append(now - begin)
        hosts.append(engine.stats().host_seconds - host)
        for output in outputs:
            name = output.request_id
            if name not in first:
                first[name] = now
                ttft.append(now - added[name])
            if output.finish_reason is not None:
                if output_len > 1:
                    tpot.append((now - first[name]) / (output_len - 1))
                del added[name]
    wall = time.perf_counter() - start
    return Cell(
        concurrency=concurrency,
        input_len=input_len,
        output_len=output_len,
        num_requests=num_requests,
        output_tokens_per_s=num_requests * output_len / wall,
        total_tokens_per_s=num_requests * (input_len + output_len) / wall,
        ttft_p50=1e3 * statistics.median(ttft),
        tpot_p50=1e3 * statistics.median(tpot) if tpot else 0.0,
        step_p50=1e3 * statistics.median(steps),
        host_p50=1e3 * statistics.median(hosts),
        host_p99=1e3 * sorted(hosts)[int(0.99 * (len(hosts) - 1))],
        num_steps=len(steps),
    )


def format_table(cells: list[Cell]) -> str:
    header = ["c", "in/out", "out tok/s", "all tok/s", "TTFT", "TPOT", "step", "host", "host p99"]
    rows = [
        [
            str(c.concurrency),
            f"{c.input_len}/{c.output_len}",
            f"{c.output_tokens_per_s:.1f}",
            f"{c.total_tokens_per_s:.1f}",
            f"{c.ttft_p50:.1f}",
            f"{c.tpot_p50:.2f}",
            f"{c.step_p50:.2f}",
            f"{c.host_p50:.3f}",
            f"{c.host_p99:.3f}",
        ]
        for c in cells
    ]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    return "\n".join(
        "  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True))
        for row in [header, *rows]
    )


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model-path", required=True)
    parser.add_argument("--load-format", default="safetensors", choices=["safetensors", "dummy"])
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    parser.add_argument("--dtype", default="auto", choices=["auto", "float32", "bfloat16"])
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=1, help="requests per stream")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--logprobs", type=int)
    parser.add_argument("--max-num-batched-tokens", type=int, help="default: auto")
    parser.add_argument("--prefill-chunk", type=int, help="default: auto")
    parser.add_argument("--json", metavar="FILE", help="write the cells there as well")
    args = parser.parse_args(arguments)
    if min(*args.concurrency, args.rounds) < 1:
        parser.error("--concurrency and --rounds are 1 or more")
    try:
        _bench(args)
    except (ValueError, OSError) as error:
        parser.error(str(error))


def _bench(args: argparse.Namespace) -> None:
    config = EngineConfig(
        args.model_path,
        load_format=args.load_format,
        device=args.device,
        dtype=args.dtype,
        max_num_seqs=max(args.concurrency),
        max_num_batched_tokens=args.max_num_batched_tokens,
        prefill_chunk=args.prefill_chunk,
        max_queue=max(args.concurrency),
    )
    start = time.perf_counter()
    engine = LLMEngine(config)
    print(f"loaded in {time.perf_counter() - start:.2f} s")
    params = {"temperature": args.temperature, "logprobs": args.logprobs}
    cells = []
    for concurrency in args.concurrency:
        shape = (concurrency, args.input_len)
        run_cell(engine, *shape, min(4, args.output_len), concurrency, params)
        cells.append(run_cell(engine, *shape, args.output_len, concurrency * args.rounds, params))
    engine.close()
    print("times in ms, medians")
    print(format_table(cells))
    if args.json:
        with open(args.json, "w") as file:
            json.dump([asdict(cell) for cell in cells], file, indent=1)


if __name__ == "__main__":
    main()
