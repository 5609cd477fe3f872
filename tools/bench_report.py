"""Numbers of benchmark runs: percentiles, median and worst over runs, tables, comparisons."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tools.bench_answers import Outcome
from tools.bench_load import RunTimes

FORMAT = 1  # of a result file
LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")
_PERCENTILES = (50, 90, 95, 99)
_RATES = ("output_tokens_per_s", "total_tokens_per_s", "requests_per_s")

Row = dict[str, Any]


def read_result(name: str) -> Row:
    """Raises ValueError for what is no result, OSError for what cannot be read."""
    result = read_object(Path(name).read_text(), name)
    if result.get("format") != FORMAT:
        raise ValueError(f"{name}: no result of this benchmark")
    return result


def read_object(text: str, what: str) -> Row:
    """Raises ValueError, naming `what`, for other than a JSON object."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{what}: not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{what}: must be a JSON object")
    return value


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear between the two nearest values; `ordered` ascends and is not empty."""
    place = share / 100 * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


def distribution(values: Iterable[float]) -> dict[str, float] | None:
    """Mean, percentiles and maximum; None of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    points = {f"p{share}": percentile(ordered, share) for share in _PERCENTILES}
    return {"mean": statistics.fmean(ordered), **points, "max": ordered[-1]}


def summarise(outcomes: Sequence[Outcome], wanted: Sequence[int], times: RunTimes) -> Row:
    """One run. `wanted`: output tokens that each request asked for; fewer is a short output."""
    done = [outcome for outcome in outcomes if outcome.error is None]
    short = sum(
        o.error is None and o.output_tokens < n for o, n in zip(outcomes, wanted, strict=True)
    )
    output = sum(o.output_tokens for o in done)
    prompt = sum(o.prompt_tokens for o in done)
    return {
        "requests": len(outcomes),
        "failed": len(outcomes) - len(done),
        "short": short,
        "errors": sorted({o.error for o in outcomes if o.error is not None})[:5],
        "prompt_tokens": prompt,
        "output_tokens": output,
        "seconds": times.seconds,
        "output_tokens_per_s": output / times.seconds,
        "total_tokens_per_s": (prompt + output) / times.seconds,
        "requests_per_s": len(done) / times.seconds,
        "ttft_ms": distribution(o.ttft for o in done),
        "tpot_ms": distribution(o.tpot for o in done if o.tpot is not None),
        "itl_ms": distribution(gap for o in done for gap in o.gaps),
        "e2e_ms": distribution(o.e2e for o in done),
        "client_share": times.client_share,
        "late_ms": times.late_ms,
        "hash_of": done[0].hash_of if done else None,
        "hashes": [o.output_hash for o in outcomes],
        "each": {
            "ttft_ms": [round(o.ttft, 3) for o in outcomes],
            "e2e_ms": [round(o.e2e, 3) for o in outcomes],
            "output_tokens": [o.output_tokens for o in outcomes],
        },
    }


def over_runs(runs: Sequence[Row]) -> tuple[Row, Row]:
    """(median, worst) of each figure: the worst rate is the lowest, the worst time the longest."""
    median: Row = {}
    worst: Row = {}
    for name in _RATES:
        values = [run[name] for run in runs]
        median[name], worst[name] = statistics.median(values), min(values)
    for name in LATENCIES:
        known = [run[name] for run in runs if run[name] is not None]
        median[name] = worst[name] = None
        if known:
            median[name] = {key: statistics.median(row[key] for row in known) for key in known[0]}
            worst[name] = {key: max(row[key] for row in known) for key in known[0]}
    for name in ("failed", "short"):
        median[name] = worst[name] = sum(run[name] for run in runs)
    return median, worst


def figure(cell: Row, path: str, which: str = "median") -> float | None:
    """`path` as "ttft_ms.p50" or "output_tokens_per_s"; None where there is no such figure."""
    value: Any = cell[which]
    for key in path.split("."):
        if value is None:
            return None
        value = value.get(key)
    return None if value is None else float(value)


COLUMNS = (
    ("out tok/s", "output_tokens_per_s"),
    ("TTFT p50", "ttft_ms.p50"),
    ("p99", "ttft_ms.p99"),
    ("TPOT p50", "tpot_ms.p50"),
    ("p99", "tpot_ms.p99"),
    ("ITL p99", "itl_ms.p99"),
    ("e2e p50", "e2e_ms.p50"),
)


def result_table(result: Row) -> str:
    """A row a cell: medians over its runs, the worst in brackets where there are several runs."""
    rows = [["cell", *(title for title, _ in COLUMNS), "failed", "short", "same output"]]
    for cell in result["cells"]:
        several = len(cell["runs"]) > 1
        row = [cell["name"]]
        for _, path in COLUMNS:
            text = number(figure(cell, path))
            row.append(f"{text} ({number(figure(cell, path, 'worst'))})" if several else text)
        check = cell.get("recheck")
        same = f"{check['equal']}/{check['requests']}" if check else ""
        rows.append([*row, str(cell["median"]["failed"]), str(cell["median"]["short"]), same])
    return format_rows(rows)


def budget_table(result: Row) -> str | None:
    """The cells that have budgets beside them, and whether the median is within."""
    rows = [["cell", "figure", "ours", "must", "aim", "peer", ""]]
    for cell in result["cells"]:
        for budget in cell.get("budgets", ()):
            ours = figure(cell, budget["figure"])
            verdict = ""
            if ours is not None and budget["must"] is not None:
                rate = budget["figure"] in _RATES
                within = [ours >= budget[k] if rate else ours <= budget[k] for k in ("aim", "must")]
                verdict = "aim" if within[0] else "must" if within[1] else "missed"
            values = [number(v) for v in (ours, budget["must"], budget["aim"], budget["peer"])]
            rows.append([cell["name"], budget["figure"], *values, verdict])
    return format_rows(rows) if len(rows) > 1 else None


def comparison_table(results: Sequence[tuple[str, Row]]) -> str:
    """Figures of the cells that the first file has, of each file, with their ratio to the first;
    and how many outputs of the first runs are equal."""
    first = {cell["name"]: cell for cell in results[0][1]["cells"]}
    rows = [["cell", "figure", *(name for name, _ in results)]]
    for name, base in first.items():
        cells = [{c["name"]: c for c in result["cells"]}.get(name) for _, result in results]
        for title, path in (
            ("out tok/s", "output_tokens_per_s"),
            ("TTFT p50", "ttft_ms.p50"),
            ("TTFT p99", "ttft_ms.p99"),
            ("TPOT p50", "tpot_ms.p50"),
            ("ITL p99", "itl_ms.p99"),
        ):
            values = [figure(cell, path) if cell else None for cell in cells]
            texts = [number(values[0])]
            for value in values[1:]:
                ratio = f" x{value / values[0]:.2f}" if value and values[0] else ""
                texts.append(number(value) + ratio)
            rows.append([name, title, *texts])
        rows.append([name, "same output", *(_equal_outputs(base, cell) for cell in cells)])
    return format_rows(rows)


def _equal_outputs(base: Row, cell: Row | None) -> str:
    if cell is None:
        return "-"
    left, right = base["runs"][0], cell["runs"][0]
    if left["hash_of"] != right["hash_of"]:
        return "not comparable"
    equal = sum(a == b for a, b in zip(left["hashes"], right["hashes"], strict=False))
    return f"{equal}/{min(len(left['hashes']), len(right['hashes']))}"


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 1000 else f"{value:.4g}"


def format_rows(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(
            text.ljust(width) if i == 0 else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )
