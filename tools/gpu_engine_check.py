"""The engine on the GPU of this machine, random weights of a true size: equal bits whatever runs
beside a request, with and without CUDA graphs, and the times of steps.

    python -m tools.gpu_engine_check [--size 4B] [--only bits time] --out FILE

`bits`: the sha256 of every fp32 logits row that is sampled, and every id, against the request run
alone: batches of 1 to 256, prompts of 1 to 4097 tokens, chunks of 64 to 8192 in mixed steps, few KV
blocks (preemption). Exits with 1 if a row differs.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tools.gpu_check import build_if_missing, gpu_arch, make_importable
from tools.gpu_model_check import Checks, free_memory

BATCHES = (1, 2, 3, 5, 8, 17, 32, 64, 128, 256)
CHUNKS = (64, 256, 1024, 8192)
OUTPUT_TOKENS = 4
NUM_REQUESTS = 256
LONG_REQUESTS, LONG_OUTPUT_TOKENS, FEW_BLOCKS = 24, 130, 70


class Engine:
    """Runners of several settings over the same random weights."""

    def __init__(self, config: Any, device_name: Any) -> None:
        from deltaserve.engine.dummy_weights import dummy_weights

        self._config = config
        self._device = device_name
        on_cpu = device_name == "cpu"
        self._act_bytes = 4 if on_cpu else 2
        device = _device(device_name)
        self._weights = dummy_weights(config, device, "float32" if on_cpu else "bfloat16")
        device.close()

    @property
    def block_bytes(self) -> int:
        """Of a KV block of the default size."""
        from deltaserve.engine.config import EngineConfig
        from deltaserve.engine.memory_sizes import block_bytes

        return block_bytes(self._config, EngineConfig.block_size, self._act_bytes)

    def runner(self, hook: Any = None, *, cuda_graph: bool = True, **options: Any) -> Any:
        from deltaserve.engine.config import EngineConfig
        from deltaserve.engine.model_loader import create_backend, create_model_runner

        settings = {"max_num_seqs": 256, "max_model_len": 16384, "kv_cache_memory": 16 << 30}
        engine_config = EngineConfig("random", device=self._device, **{**settings, **options})
        backend = create_backend(engine_config, self._config)
        return create_model_runner(
            self._config,
            backend,
            self._weights,
            vocab_limit=self._config.vocab_size,
            cuda_graph=cuda_graph,
            logits_hook=hook,
        )


def _device(name: str) -> Any:
    if name == "cpu":
        from deltaserve.engine.ops.numpy.device import CpuDevice

        return CpuDevice()
    from deltaserve.engine.ops.cuda.device import CudaDevice

    return CudaDevice()


class Rows:
    """Hashes of logits rows by (request, position), and ids by request."""

    def __init__(self) -> None:
        self.hashes: dict[tuple[str, int], str] = {}
        self.ids: dict[str, list[int]] = {}

    def hook(self, request_id: str, position: int, row: Any) -> None:
        host = row if isinstance(row, np.ndarray) else row.get()
        self.hashes[request_id, position] = hashlib.sha256(host.tobytes()).hexdigest()

    def run(self, runner: Any, sequences: list[Any]) -> None:
        from tools.engine_timings import run_requests

        run_requests(runner, sequences)
        for sequence in sequences:
            self.ids[sequence.request_id] = list(sequence.output_ids)

    def differences(self, alone: Rows) -> int:
        wrong = sum(alone.hashes[key] != value for key, value in self.hashes.items())
        return wrong + sum(alone.ids[name] != ids for name, ids in self.ids.items())


def requests(vocab: int, count: int, max_tokens: int = OUTPUT_TOKENS) -> list[Any]:
    """Prompts of 1 to 4097 tokens; every eighth is sampled, not greedy, and every fourth has
    penalties on few ids, so that its tokens depend on how often each came before."""
    from deltaserve.engine.sampling_params import SamplingParams
    from deltaserve.engine.sequence import Sequence

    rng = np.random.default_rng(7)
    lengths = [1, 2, 63, 64, 65, 127, 128, 129, 1023, 1024, 1025, 4097]
    lengths += rng.integers(1, 400, NUM_REQUESTS - len(lengths)).tolist()
    found = []
    for i, length in enumerate(np.array(lengths)[rng.permutation(NUM_REQUESTS)][:count].tolist()):
        ids = tuple(np.random.default_rng([3, i]).integers(0, vocab, length).tolist())
        temperature = 1.0 if i % 8 == 7 else 0.0
        penalties: dict[str, Any] = {
            "allowed_token_ids": tuple(range(i, vocab, vocab // 16)),
            "presence_penalty": 1.5,
            "frequency_penalty": 0.3,
            "repetition_penalty": 1.1,
        }
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=0.9,
            ignore_eos=True,
            **(penalties if i % 4 == 3 else {}),
        )
        found.append(Sequence(f"{i}", ids, params, seed=i))
    return found


def bits(engine: Engine, vocab: int) -> Iterator[dict[str, Any]]:
    alone = Rows()
    runner = engine.runner(alone.hook)
    for sequence in requests(vocab, NUM_REQUESTS):
        alone.run(runner, [sequence])
    for batch in BATCHES:
        rows = Rows()
        runner._logits_hook = rows.hook
        rows.run(runner, requests(vocab, batch))
        yield _row(f"batch {batch}", rows, alone)
    runner.close()
    settings: list[tuple[str, int, dict[str, Any]]] = [
        (f"chunk {chunk}", 64, {"prefill_chunk": chunk}) for chunk in CHUNKS
    ]
    settings.append(("no graphs", 64, {"cuda_graph": False}))
    for name, count, options in settings:
        rows = Rows()
        runner = engine.runner(rows.hook, **options)
        sequences = requests(vocab, count)
        rows.run(runner, sequences)
        runner.close()
        yield _row(name, rows, alone)
        free_memory()


def preemption_bits(engine: Engine, vocab: int) -> Iterator[dict[str, Any]]:
    """Outputs long enough that sequences grow into each other's blocks."""
    runs = []
    for num_blocks, together in ((16 * FEW_BLOCKS, False), (FEW_BLOCKS, True)):
        rows = Rows()
        memory = num_blocks * engine.block_bytes
        runner = engine.runner(rows.hook, kv_cache_memory=memory, max_model_len=1024)
        made = requests(vocab, LONG_REQUESTS, LONG_OUTPUT_TOKENS)
        made = [sequence for sequence in made if len(sequence.prompt_ids) < 400]
        for group in [made] if together else [[sequence] for sequence in made]:
            rows.run(runner, group)
        runner.close()
        free_memory()
        runs.append(rows)
    preemptions = sum(sequence.num_preemptions for sequence in made)
    row = _row("few blocks", runs[1], runs[0])
    yield {**row, "preemptions": preemptions, "ok": row["ok"] and preemptions > 0}


def _row(what: str, rows: Rows, alone: Rows) -> dict[str, Any]:
    different = rows.differences(alone)
    return {"what": what, "rows": len(rows.hashes), "different": different, "ok": not different}


def times(engine: Engine, batches: tuple[int, ...]) -> Iterator[dict[str, Any]]:
    from tools.engine_timings import timings

    began = time.perf_counter()
    runner = engine.runner(kv_cache_memory=32 << 30)
    yield {"what": "plan, caches, kernels and graphs", "s": time.perf_counter() - began}
    prompts = ((1, 128), (1, 1024), (1, 2048), (1, 8192), (8, 1024), (64, 128))
    yield from timings(runner, batches, prompts, context=1100)
    runner.close()
    free_memory()
    runner = engine.runner(cuda_graph=False, kv_cache_memory=32 << 30)
    for row in timings(runner, (1, 64), (), context=1100):
        yield {**row, "what": f"{row['what']}, no graphs"}
    runner.close()
    free_memory()


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="4B")
    parser.add_argument("--only", nargs="+", default=["bits", "time"])
    parser.add_argument("--batches", nargs="+", type=int, default=[1, 4, 16, 64, 256])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    make_importable()
    from deltaserve.engine.config import ModelConfig
    from tools.model_shapes import hf_text_config

    if options.device == "cuda":
        build_if_missing(gpu_arch())
    config = ModelConfig.from_hf(hf_text_config(options.size))
    began = time.perf_counter()
    engine = Engine(config, options.device)
    print(f"weights in {time.perf_counter() - began:.1f} s", flush=True)
    checks = Checks(options.out)
    if "time" in options.only:
        checks.run("time", lambda: times(engine, tuple(options.batches)))
    if "bits" in options.only:
        checks.run("bits", lambda: bits(engine, config.vocab_size))
        checks.run("preemption", lambda: preemption_bits(engine, config.vocab_size))
    checks.print_table()
    return 1 if checks.failures else 0


if __name__ == "__main__":
    sys.exit(main())
