"""Plots of benchmark results: TTFT, TPOT and throughput against load. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench_report import Row, figure

_PLOTS = (
    ("ttft", "TTFT (ms)", ("ttft_ms.p50", "ttft_ms.p99"), True),
    ("tpot", "TPOT (ms)", ("tpot_ms.p50", "tpot_ms.p99"), True),
    ("throughput", "output tokens/s", ("output_tokens_per_s",), False),
)
_LOADS = (("concurrency", "streams"), ("qps", "requests/s"))


def plot_results(results: Sequence[tuple[str, Row]], folder: Path) -> list[Path]:
    """One PNG a figure and kind of load, a line for each result and shape; the files written.

    A plot with fewer than two loads of a shape is left out.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for kind, load_label in _LOADS:
        lines = _lines(results, kind)
        if not lines:
            continue
        for name, label, paths, logarithmic in _PLOTS:
            chart, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
            for title, cells in lines.items():
                _draw(axes, title, kind, cells, paths)
            axes.set_xscale("log", base=2)
            if logarithmic:
                axes.set_yscale("log")
            axes.set_xlabel(load_label)
            axes.set_ylabel(label)
            axes.grid(alpha=0.3)
            axes.legend(fontsize="small")
            path = folder / f"{name}_{kind}.png"
            chart.savefig(path, dpi=144)
            pyplot.close(chart)
            written.append(path)
    return written


def _lines(results: Sequence[tuple[str, Row]], kind: str) -> dict[str, list[Row]]:
    """Title -> cells of one result and shape by rising load, where there are two or more."""
    lines: dict[str, list[Row]] = {}
    for name, result in results:
        for cell in result["cells"]:
            if cell["load"][kind] is not None:
                shape = cell["name"].rpartition(" ")[2]
                lines.setdefault(f"{name} {shape}".strip(), []).append(cell)
    return {
        title: sorted(cells, key=lambda cell: float(cell["load"][kind]))
        for title, cells in lines.items()
        if len({cell["load"][kind] for cell in cells}) > 1
    }


def _draw(axes: Any, title: str, kind: str, cells: list[Row], paths: Sequence[str]) -> None:
    """Percentiles of one line share its colour."""
    colour = None
    for path, style in zip(paths, ("-o", ":"), strict=False):
        points = [(c["load"][kind], figure(c, path)) for c in cells]
        known = [(x, y) for x, y in points if y is not None]
        if not known:
            continue
        suffix = f" {path.rpartition('.')[2]}" if len(paths) > 1 else ""
        drawn = axes.plot(*zip(*known, strict=True), style, label=title + suffix, color=colour)
        colour = drawn[0].get_color()
