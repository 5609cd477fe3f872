"""GEMM on the GPU: right against float64, and equal bits over rows and tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from deltaserve.engine.ops.cuda.gemm import Gemm, compiled_tiles, named_tile
from deltaserve.engine.ops.cuda.loader import KernelLibrary
from tools.gpu_arrays import Arrays, relative_error

# Qwen3.5-4B: (weight, form, N, K); N is the number of outputs, of which silu_mul has two rows each.
SHAPES = (
    ("qkvzba", "bf16", 12352, 2560),
    ("qgkv", "bf16", 10240, 2560),
    ("out", "partials", 2560, 4096),
    ("gate_up", "silu_mul", 9216, 2560),
    ("down", "partials", 2560, 9216),
    ("out", "bf16", 2560, 4096),
    ("down", "bf16", 2560, 9216),
    ("lm_head", "fp32", 248320, 2560),
)
ROWS = (1, 2, 3, 5, 8, 17, 32, 64, 128, 256, 1024, 4096)
DECODE_ROWS = 256  # partials and logits are made of no more

Launch = Callable[[Any, Any, Any], None]
CheckedShapes = tuple[tuple[int, int, int], ...]
CHECKED: CheckedShapes = ((1, 200, 256), (19, 4128, 1152), (150, 2560, 4096), (600, 8200, 512))
CHECKED_DECODE: CheckedShapes = ((3, 200, 256), (8, 2560, 4096))
"""M, N, K; the second of few rows, which cuda/gemm_decode.cu is for."""
CHECKED_CLUSTER = ((300, 200, 192, 1), (131, 4128, 768, 3), (1030, 2568, 512, 2), (5, 72, 64, 1))
"""M, N, K, segments of partial sums."""


def run(gemm: Gemm, form: str, x: Any, weight: Any, out: Any) -> None:
    """One GEMM by the table's choice of tile."""
    functions: dict[str, Launch] = {
        "bf16": gemm.linear,
        "fp32": gemm.linear_fp32,
        "partials": gemm.linear_partials,
        "silu_mul": gemm.linear_silu_mul,
    }
    functions[form](x, weight, out)


def out_shape(gemm: Gemm, form: str, m: int, n: int, k: int) -> tuple[tuple[int, ...], str]:
    if form == "partials":
        return (gemm.num_segments(n, k), m, n), "float32"
    return (m, n), "float32" if form == "fp32" else "bfloat16"


def output(a: Arrays, gemm: Gemm, form: str, m: int, n: int, k: int) -> Any:
    shape, dtype = out_shape(gemm, form, m, n, k)
    return a.poisoned(*shape, dtype=a.act(1).dtype if dtype == "bfloat16" else dtype)


def check_gemm(
    gemm: Gemm, a: Arrays, shapes: CheckedShapes = CHECKED
) -> Iterator[tuple[str, float, float]]:
    """Against float64; fp32 sums of bf16 products to 1e-5, rounded results to 4e-3."""
    for m, n, k in shapes:
        for form in ("bf16", "fp32", "partials", "silu_mul"):
            weight = a.act(2 * n if form == "silu_mul" else n, k, scale=k**-0.5)
            x, out = a.act(m, k), output(a, gemm, form, m, n, k)
            run(gemm, form, x, weight, out)
            product = a.host(x).astype(np.float64) @ a.host(weight).astype(np.float64).T
            actual = a.host(out)
            if form == "silu_mul":
                gate, up = product[:, :n], product[:, n:]
                product = gate / (1 + np.exp(-gate)) * up
            if form == "partials":
                actual = actual.astype(np.float64).sum(0)
            tolerance = {"bf16": 4e-3, "silu_mul": 8e-3}.get(form, 1e-5)
            yield f"{form} {m}x{n}x{k}", relative_error(actual, product), tolerance


def check_gemm_cluster(
    kernels: KernelLibrary, gemm: Gemm, a: Arrays
) -> Iterator[tuple[str, float, float]]:
    """The same of every tile of cuda/sm_90/gemm_cluster.cu, whichever a table chooses."""
    for m, n, k, segments in CHECKED_CLUSTER:
        x = a.act(m, k)
        host_x = a.host(x).astype(np.float64)
        for form in ("bf16", "fp32", "silu_mul"):
            gates = 2 if form == "silu_mul" else 1
            weight = a.act(gates * n, k, scale=k**-0.5)
            product = host_x @ a.host(weight).astype(np.float64).T
            if form == "silu_mul":
                product = product[:, :n] / (1 + np.exp(-product[:, :n])) * product[:, n:]
            count, kind = (segments, {"dtype": "float32"}) if form == "fp32" else (1, {})
            for name in compiled_tiles(form, kernels.names()):
                if name.startswith("cluster"):
                    out = a.poisoned(count, m, n, **kind)
                    cut = n, k // count, count
                    gemm.launch_tile(named_tile(form, name), x, weight, out, *cut)
                    actual = a.host(out).astype(np.float64).sum(0)
                    tolerance = {"bf16": 4e-3, "silu_mul": 8e-3, "fp32": 1e-5}[form]
                    error = relative_error(actual, product)
                    yield f"{form} {name} {m}x{n}x{k} / {count}", error, tolerance


def differing_rows(got: Any, wanted: Any) -> int:
    """Rows [..., M, N] of which any bit differs, or that still hold poison."""
    bits = f"uint{8 * got.dtype.itemsize}"
    got, wanted = got.view(bits), wanted.view(bits)
    poison = np.iinfo(bits).max
    return int(((got != wanted) | (got == poison)).any(axis=-1).sum())


def invariance_of_table(gemm: Gemm, a: Arrays) -> Iterator[tuple[str, int]]:
    """(what, differing rows): each form's rows at every M against those of the largest M, with the
    tiles that the table chooses; and row 37 alone."""
    for name, form, n, k in SHAPES:
        most = ROWS[-1] if form in ("bf16", "silu_mul") else DECODE_ROWS
        x = a.act(most, k)
        weight = a.filled(2 * n if form == "silu_mul" else n, k, scale=k**-0.5)
        whole = output(a, gemm, form, most, n, k)
        run(gemm, form, x, weight, whole)
        count = 0
        for first, m in [(0, m) for m in ROWS if m < most] + [(37, 1), (100, 60)]:
            part = output(a, gemm, form, m, n, k)
            run(gemm, form, x[first : first + m], weight, part)
            count += differing_rows(part, whole[..., first : first + m, :])
        yield f"{name} {form} {n}x{k}", count


def invariance_of_tiles(kernels: KernelLibrary, gemm: Gemm, a: Arrays) -> Iterator[tuple[str, int]]:
    """(tile, differing fp32 rows): every compiled fp32 tile at every M against the first one."""
    tiles = compiled_tiles("fp32", kernels.names())
    counts = dict.fromkeys(tiles, 0)
    for _, _, n, k in [shape for shape in SHAPES if shape[1] == "bf16"]:
        x, weight = a.act(ROWS[-1], k), a.filled(n, k, scale=k**-0.5)
        whole = a.poisoned(ROWS[-1], n, dtype="float32")
        gemm.launch_tile(named_tile("fp32", tiles[0]), x, weight, whole, n, k, 1)
        for name in tiles:
            tile = named_tile("fp32", name)
            # small tiles at large M only reread weights: a few M show as much
            for m in ROWS if tile.persistent else ROWS[:-2]:
                part = a.poisoned(m, n, dtype="float32")
                gemm.launch_tile(tile, x[:m], weight, part, n, k, 1)
                counts[name] += differing_rows(part, whole[:m])
    yield from counts.items()


def invariance_of_groups(gemm: Gemm, a: Arrays) -> Iterator[tuple[str, int]]:
    """(form, differing rows): grouped launches against one launch a group."""
    n, k = 520, 1024
    for sizes in ((0, 5, 1, 30, 0, 16), (200, 0, 77, 128)):
        starts = np.cumsum([0, *sizes])
        x = a.act(int(starts[-1]), k)
        for form, gates in (("bf16", 1), ("silu_mul", 2)):
            weights = a.filled(len(sizes), gates * n, k, scale=k**-0.5)
            weights[1] = a.act(gates * n, k, scale=k**-0.5)
            grouped = gemm.linear_grouped if form == "bf16" else gemm.linear_silu_mul_grouped
            got, wanted = a.poisoned(len(x), n), a.poisoned(len(x), n)
            grouped(x, weights, a.int32(starts), got)
            for weight, first, end in zip(weights, starts, starts[1:], strict=False):
                if end > first:
                    run(gemm, form, x[first:end], weight, wanted[first:end])
            yield f"{form} groups {sizes}", differing_rows(got, wanted)
