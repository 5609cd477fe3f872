"""Tunes one model's GEMM tiles, part by part, as tools/tune_gemm.py says. Owns the order, the time
given to each part and the record of figures; gemm_timings times, gemm_choice has the rules."""

from __future__ import annotations

import copy
import functools
import time
from typing import Any

from deltaserve.engine.config import ModelConfig
from deltaserve.engine.ops.base import MAX_SEGMENTS
from deltaserve.engine.ops.cuda import norm
from tools.gemm_choice import (
    ALONE_MARGIN,
    DECODE_M,
    Choice,
    Measure,
    Role,
    choice_of,
    descend,
    proven,
    roles_of,
    winner,
    with_choice,
)
from tools.gemm_timings import (
    LoneTiles,
    TableOps,
    TurnTimer,
    WithTable,
    chain_launches,
    engine_launches,
    engine_model,
)
from tools.gpu_arrays import Arrays
from tools.gpu_op_checks import EPS
from tools.model_shapes import hf_text_config

ALONE_SHARE, CHAIN_SHARE = 0.45, 0.75
"""Of the seconds: when the tiles alone and the chain end."""
FEW = 4
SEGMENT_ROWS = 8, 64


class Tuning:
    """One model's tiles: `table` is what stands so far, `measured` every figure."""

    def __init__(self, cupy: Any, kernels: Any, model: str, seconds: float) -> None:
        self._cupy, self._compiled, self._model = cupy, kernels, model
        self._config = ModelConfig.from_hf(hf_text_config(model))
        self._timer, self._arrays = TurnTimer(cupy), Arrays(cupy, 1)
        self._began, self._seconds = time.monotonic(), seconds
        self.table: dict[str, Any] = copy.deepcopy(kernels.gemm_tiles)
        self.measured: list[dict[str, Any]] = []

    def run(self, rows: list[int]) -> None:
        """Parts 1 to 3."""
        offered = self._alone(rows)
        self._free()
        chosen: dict[int, Choice] = {}
        for m in [m for m in rows if m <= DECODE_M]:
            if not self._has_time(CHAIN_SHARE):
                self._say(f"M={m}: no time for the chain, as it was")
                continue
            old = choice_of(self.table, roles_of(self._config, m), m)
            chosen[m] = self._in_chain(m, old, offered[m])
            self._free()
            if chosen[m] == old:
                del chosen[m]
        if chosen:
            self._in_engine(chosen)
            self._free()

    @property
    def _kernels(self) -> WithTable:
        return WithTable(self._compiled, self.table)

    def segments(self) -> None:
        """Sets the number of segments of each shape that is cut."""
        for role in roles_of(self._config, SEGMENT_ROWS[0]):
            if role.segmented:
                shape = f"{role.n}x{role.k}"
                self.table["segments"]["shapes"][shape] = self._best_segments(role, shape)
                self._free()

    def _alone(self, rows: list[int]) -> dict[int, dict[str, list[str]]]:
        """M -> role -> the fastest tiles with the bits of the table's, of those a step can take;
        tiles of prompts go into the table at once."""
        lone = LoneTiles(self._kernels, self._arrays, self._timer)
        offered: dict[int, dict[str, list[str]]] = {m: {} for m in rows}
        roles = {role: None for m in rows for role in roles_of(self._config, m)}
        for role, m in [(role, m) for role in roles for m in rows]:
            if role not in roles_of(self._config, m):
                continue
            if not self._has_time(ALONE_SHARE):
                self._say(f"{role.name} M={m}: no time alone, as it was")
                continue
            now = choice_of(self.table, [role], m)[role.name]
            serving = [tile for tile in lone.serving(role, m) if tile != now]
            times = lone.times(role, m, [now, *serving], 3)
            self._note("alone", m, times, role.name)
            fastest = [t for t in sorted(times, key=lambda t: times[t]) if t != now][:FEW]
            equal = [t for t in fastest if lone.same_bits(role, m, now, t)]
            for tile in [t for t in fastest if t not in equal]:
                self._say(f"{role.name} M={m}: other bits, left out: {tile}")
            if m <= DECODE_M:
                offered[m][role.name] = equal
                continue
            tried = {tile: {role.name: tile} for tile in (now, *equal)}
            best = winner(self._by_itself(lone, role, m), tried, now, ALONE_MARGIN)
            self.table = with_choice(self.table, [role], m, {role.name: best})
        lone.free()
        return offered

    def _in_chain(self, m: int, old: Choice, offered: dict[str, list[str]]) -> Choice:
        ops = TableOps(self._kernels, self._config, m, self._cupy.empty)
        launches = chain_launches(ops, self._arrays, self._config, m)
        measure = self._in_step("chain", ops, m, launches)
        return descend(measure, old, offered, functools.partial(self._has_time, CHAIN_SHARE))

    def _in_engine(self, chosen: dict[int, Choice]) -> None:
        model, ops = engine_model(self._config, self._kernels, max(chosen))
        for m, new in chosen.items():
            if not self._has_time(1.0):
                self._say(f"M={m}: no time for the engine's step, as it was")
                continue
            roles = roles_of(self._config, m)
            measure = self._in_step("engine", ops, m, engine_launches(model, m))
            best = proven(measure, choice_of(self.table, roles, m), new)
            self.table = with_choice(self.table, roles, m, best)
        self._cupy.cuda.Stream.null.use()  # not the one of the device that ends here

    def _by_itself(self, lone: LoneTiles, role: Role, m: int) -> Measure:
        def noted(tried: dict[str, Choice]) -> dict[str, float]:
            found = lone.times(role, m, list(tried), 5)
            self._note("alone again", m, found, role.name)
            return found

        return noted

    def _in_step(self, part: str, ops: TableOps, m: int, launches: list[Any]) -> Measure:
        times = ops.measure(self._timer, roles_of(self._config, m), m, launches)

        def noted(tried: dict[str, Choice]) -> dict[str, float]:
            found = times(tried)
            self._note(part, m, found, "step", tried)
            return found

        return noted

    def _best_segments(self, role: Role, shape: str) -> int:
        """The fastest over SEGMENT_ROWS, each with its best tile and the sum after it."""
        a, totals = self._arrays, dict.fromkeys(range(1, MAX_SEGMENTS + 1), 0.0)
        for m in SEGMENT_ROWS:
            tried = {}
            for count in totals:
                rule = {**self.table["segments"], "shapes": {shape: count}}
                cut = WithTable(self._compiled, {**self.table, "segments": rule})
                lone = LoneTiles(cut, a, self._timer)
                parts, x = a.fp32(count, m, role.n), a.act(m, role.n)
                args = self._compiled, parts, x, a.act(role.n), EPS, a.act(m, role.n)
                add = functools.partial(norm.add_rms_norm_partials, *args)
                gemms = lone.launches(role, m, lone.serving(role, m))
                for tile, launches in gemms.items():
                    tried[f"{count} {tile}"] = [one for gemm in launches for one in (gemm, add)]
            found = self._timer.medians(tried, 3, 300.0)
            self._note("segments", m, found, role.name)
            for count in totals:  # as many launches with each
                totals[count] += min(us for name, us in found.items() if name[0] == str(count))
        return min(totals, key=lambda count: totals[count])

    def _note(
        self,
        part: str,
        m: int,
        times: dict[str, float],
        role: str,
        tried: dict[str, Choice] | None = None,
    ) -> None:
        shared = {"model": self._model, "part": part, "M": m, "role": role}
        for name, us in times.items():
            tiles = {"tiles": tried[name]} if tried else {}
            self.measured.append({**shared, "what": name, "us": round(us, 2), **tiles})
        best = sorted(times, key=lambda name: times[name])[:FEW]
        self._say(f"{part} {role} M={m}: " + ", ".join(f"{times[t]:.1f} {t}" for t in best))

    def _has_time(self, share: float) -> bool:
        return time.monotonic() - self._began < share * self._seconds

    def _free(self) -> None:
        self._cupy.get_default_memory_pool().free_all_blocks()

    def _say(self, line: str) -> None:
        print(f"{self._model} {line}", flush=True)
