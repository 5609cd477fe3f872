"""The cells of the benchmark table, with the budgets and figures of a peer.

Budgets hold for Qwen3.5-4B in bfloat16 on an H200. The peer is vLLM 0.26.0 with its defaults and
dummy weights, measured on that card: token-id prompts, greedy, fixed outputs, no prefix cache.
"""

from __future__ import annotations

from dataclasses import dataclass

from tools.bench_load import Load

RATE, TTFT, TPOT = "output_tokens_per_s", "ttft_ms.p50", "tpot_ms.p50"


@dataclass(frozen=True)
class Budget:
    figure: str
    must: float | None
    aim: float | None
    peer: float | None


@dataclass(frozen=True)
class Cell:
    """`requests` of a run, `quick` of the one run of --quick."""

    load: Load
    input_len: int
    output_len: int
    requests: int
    quick: int
    budgets: tuple[Budget, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.load} {self.input_len}/{self.output_len}"


def _streams(count: int) -> Load:
    return Load(concurrency=count)


TABLE = (
    Cell(
        _streams(1), 1024, 128, 16, 8,
        (Budget(RATE, None, None, 224), Budget(TTFT, 20, 15, 106), Budget(TPOT, 2.6, 2.2, 3.67)),
    ),
    Cell(
        _streams(1), 1, 256, 8, 4,
        (Budget(RATE, None, None, 276), Budget(TTFT, None, None, 11.6),
         Budget(TPOT, None, None, 3.58)),
    ),
    Cell(
        _streams(4), 1024, 128, 32, 16,
        (Budget(RATE, 1150, 1350, 820), Budget(TTFT, None, None, 166),
         Budget(TPOT, None, None, 3.72)),
    ),
    Cell(
        _streams(16), 1024, 128, 192, 64,
        (Budget(RATE, 3000, 3500, 2316), Budget(TTFT, None, None, 295),
         Budget(TPOT, None, None, 4.55)),
    ),
    Cell(
        _streams(64), 1024, 128, 384, 192,
        (Budget(RATE, 4700, 5600, 4152), Budget(TTFT, None, None, 498),
         Budget(TPOT, None, None, 10.5)),
    ),
    Cell(
        _streams(256), 1024, 128, 768, 512,
        (Budget(RATE, 5700, 6500, 5332), Budget(TTFT, None, None, 2217),
         Budget(TPOT, None, None, 30.7)),
    ),
    Cell(
        _streams(64), 128, 256, 256, 192,
        (Budget(RATE, 10000, 12500, 8220), Budget(TTFT, None, None, 266),
         Budget(TPOT, None, None, 6.94)),
    ),
    Cell(
        Load(qps=1), 1024, 128, 12, 12,
        (Budget(TTFT, None, None, 95), Budget(TPOT, None, None, 3.62)),
    ),
    Cell(
        Load(qps=2), 1024, 128, 20, 20,
        (Budget(TTFT, None, None, 119), Budget(TPOT, None, None, 5.16)),
    ),
    Cell(
        Load(qps=16), 1024, 128, 192, 192,
        (Budget(RATE, None, None, 2044), Budget(TTFT, 60, 35, 200), Budget(TPOT, 8, 5, 29.0)),
    ),
    Cell(_streams(1), 2048, 1, 16, 8, (Budget(TTFT, None, None, 93),)),
    Cell(_streams(1), 8192, 1, 8, 4, (Budget(TTFT, 140, 115, 146),)),
)  # fmt: skip
