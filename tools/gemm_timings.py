"""Times GEMM tiles on the GPU: alone, in the chain of a decode step's GEMMs and norms, and in the
engine's whole decode step; and compares their bits. Chooses nothing.

The card's clock falls under load, so what is to be compared is timed in turns: a round of each in
one graph each, several rounds, the median of each.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

from deltaserve.engine.config import ModelConfig
from deltaserve.engine.ops.cuda.gemm import Gemm, compiled_tiles, named_tile
from deltaserve.engine.ops.cuda.ops import CudaOps, OpsShape
from tools.bench_ops import step_launches
from tools.engine_model import EngineModel, Parts
from tools.gemm_choice import Choice, Measure, Role, with_choice
from tools.gpu_arrays import Arrays
from tools.gpu_gemm import differing_rows
from tools.gpu_timing import copies_for
from tools.op_benchmarks import Bench

CONTEXT = 1100
_MAX_LEN = CONTEXT + 52
_MAX_PREFILL = 256
_SEGMENT_STEP = 128
_SETTLE_SECONDS = 0.015
_SECOND_ROWS = 5
"""Rows over the half of m at which bits are compared, too: a last tile that is not full."""

Launch = Callable[[], None]


class TurnTimer:
    """Times lists of launches in turns, on a stream of its own."""

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._stream = cupy.cuda.Stream(non_blocking=True)

    def medians(
        self, tried: dict[str, list[Launch]], rounds: int, min_us: float
    ) -> dict[str, float]:
        """Microseconds of each list. What the driver refuses to launch is left out, and said."""
        graphs = {}
        for name, launches in tried.items():
            try:
                graphs[name] = self._capture(launches)
            except RuntimeError as error:
                print(f"left out: {name}: {error}", flush=True)
        times: dict[str, list[float]] = {name: [] for name in graphs}
        if graphs:
            self._settle(next(iter(graphs.values())))
        for _ in range(rounds):
            for name, graph in graphs.items():
                once = times[name][-1] if times[name] else self._replay(graph, 1)
                times[name].append(self._replay(graph, max(1, int(min_us / once))))
        return {name: statistics.median(values) for name, values in times.items()}

    def _capture(self, launches: list[Launch]) -> Any:
        self._cupy.cuda.Device().synchronize()
        with self._stream:
            for launch in launches:
                launch()
            self._stream.synchronize()
            self._stream.begin_capture()
            for launch in launches:
                launch()
            return self._stream.end_capture()

    def _replay(self, graph: Any, replays: int) -> float:
        """Microseconds a replay, after one that is not counted."""
        start, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        graph.launch(self._stream)
        start.record(self._stream)
        for _ in range(replays):
            graph.launch(self._stream)
        end.record(self._stream)
        end.synchronize()
        return 1000.0 * float(self._cupy.cuda.get_elapsed_time(start, end)) / replays

    def _settle(self, graph: Any) -> None:
        """After a pause the card's clocks are low."""
        began = time.monotonic()
        while time.monotonic() - began < _SETTLE_SECONDS:
            self._replay(graph, 4)


class WithTable:
    """A kernel library with another table of tiles."""

    def __init__(self, kernels: Any, table: dict[str, Any]) -> None:
        self._kernels = kernels
        self.gemm_tiles = table

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernels, name)


class LoneTiles:
    """Tiles of one role at a time, by themselves; keeps the weights of the last role."""

    def __init__(self, kernels: Any, arrays: Arrays, timer: TurnTimer) -> None:
        self._kernels, self._arrays, self._timer = kernels, arrays, timer
        self._gemm = Gemm(kernels)
        self._weights: tuple[tuple[int, int], list[Any]] = (0, 0), []

    def free(self) -> None:
        self._weights = (0, 0), []

    def serving(self, role: Role, m: int) -> list[str]:
        """Compiled tiles that can serve m rows, without those that would be mostly padding or read
        the weights again and again."""
        segment, _ = self._segments(role)
        names = compiled_tiles(role.form, self._kernels.names())
        tiles = {name: named_tile(role.form, name) for name in names}
        return [
            name
            for name, tile in tiles.items()
            if role.k % tile.block_k == 0
            and segment % tile.block_k == 0
            and min(m, 128) // 2 <= tile.rows <= max(2 * m, 16)
        ]

    def times(self, role: Role, m: int, names: list[str], rounds: int) -> dict[str, float]:
        """Tile -> microseconds a launch."""
        tried = self.launches(role, m, names)
        found = self._timer.medians(tried, rounds, 300.0)
        return {name: us / len(tried[name]) for name, us in found.items()}

    def launches(self, role: Role, m: int, names: list[str]) -> dict[str, list[Launch]]:
        """Eight or more of each tile, over more weights than the cache holds."""
        weights, (segment, segments) = self._rotated(role), self._segments(role)
        weights = weights * max(1, 8 // len(weights))
        x, out = self._arrays.filled(m, role.k), self._out(role, m, segments)

        def one(name: str, weight: Any) -> Launch:
            tile, cut = named_tile(role.form, name), (role.n, segment, segments)
            return functools.partial(self._gemm.launch_tile, tile, x, weight, out, *cut)

        return {name: [one(name, weight) for weight in weights] for name in names}

    def same_bits(self, role: Role, m: int, old: str, name: str) -> bool:
        """Whether a tile writes what the old one does, for m rows and for some half; as well with
        fp32 outputs, in which a difference cannot hide, where both are compiled for them."""
        found = self._differing(role, *self._segments(role), m, old, name)
        if role.form != "fp32" and {old, name} <= set(
            compiled_tiles("fp32", self._kernels.names())
        ):
            plain = Role(role.name, "fp32", role.weight_rows, role.k)
            found += self._differing(plain, role.k, 1, m, old, name)
        return found == 0

    def _differing(
        self, role: Role, segment: int, segments: int, m: int, old: str, name: str
    ) -> int:
        weight, x = self._rotated(role)[0], self._arrays.act(m, role.k)
        cut = role.n, segment, segments
        wanted, count = self._out(role, m, segments), 0
        self._gemm.launch_tile(named_tile(role.form, old), x, weight, wanted, *cut)
        for rows in {m, min(m, m // 2 + _SECOND_ROWS)}:
            got = self._out(role, rows, segments)
            self._gemm.launch_tile(named_tile(role.form, name), x[:rows], weight, got, *cut)
            count += differing_rows(got, wanted[:, :rows])
        return count

    def _segments(self, role: Role) -> tuple[int, int]:
        """(length, count) of the segments of K, as Gemm cuts it."""
        count = self._gemm.num_segments(role.n, role.k) if role.segmented else 1
        return -(-role.k // count // _SEGMENT_STEP) * _SEGMENT_STEP, count

    def _out(self, role: Role, m: int, segments: int) -> Any:
        kind = {"dtype": "float32"} if role.form == "fp32" else {}
        return self._arrays.poisoned(segments, m, role.n, **kind)

    def _rotated(self, role: Role) -> list[Any]:
        size = role.weight_rows, role.k
        if self._weights[0] != size:
            self.free()
            count = copies_for(2 * size[0] * size[1])
            made = [self._arrays.filled(*size, scale=role.k**-0.5) for _ in range(count)]
            self._weights = size, made
        return self._weights[1]


class TableOps(CudaOps):
    """Ops that can change to another table of tiles between launches."""

    def __init__(self, kernels: Any, c: ModelConfig, rows: int, empty: Any) -> None:
        shape = OpsShape(c.num_query_heads, c.num_value_heads, rows, _MAX_PREFILL)
        super().__init__(kernels, shape, empty)

    def use(self, gemm: Gemm) -> None:
        self._gemm = gemm

    def measure(
        self, timer: TurnTimer, roles: list[Role], m: int, launches: list[Launch]
    ) -> Measure:
        """Times a step of m rows, `launches` of these ops, with one choice of tiles or another."""
        kernels = self._kernels

        def times(tried: dict[str, Choice]) -> dict[str, float]:
            def with_tiles(choice: Choice) -> list[Launch]:
                table = with_choice(kernels.gemm_tiles, roles, m, choice)
                gemm = Gemm(WithTable(kernels, table))
                return [functools.partial(self.use, gemm), *launches]

            steps = {name: with_tiles(choice) for name, choice in tried.items()}
            return timer.medians(steps, 5, 5000.0)

        return times


def chain_launches(ops: TableOps, arrays: Arrays, c: ModelConfig, m: int) -> list[Launch]:
    """A decode step's GEMMs and norms, each layer with weights of its own."""
    return step_launches(Bench(ops, arrays, c), m, norms=True)


def engine_model(c: ModelConfig, kernels: Any, rows: int) -> tuple[EngineModel, TableOps]:
    """The engine's model with random weights, for steps of up to `rows` sequences."""
    from deltaserve.engine.dummy_weights import dummy_weights
    from deltaserve.engine.ops.cuda.device import CudaDevice

    device = CudaDevice()
    ops = TableOps(kernels, c, rows, device.empty)
    parts = Parts(device, ops, "bfloat16", rows, _MAX_PREFILL)
    weights = dummy_weights(c, device, "bfloat16")
    return EngineModel(c, weights, parts, _MAX_LEN), ops


def engine_launches(model: EngineModel, m: int) -> list[Launch]:
    """A whole decode step of m sequences of some CONTEXT tokens."""
    rows = [(slot, 1000 + 77 * slot, CONTEXT + slot % 48) for slot in range(m)]
    launch, _ = model.decode_step(rows)
    return [launch]
