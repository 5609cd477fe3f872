"""Every Triton kernel that is compiled for an architecture, as plain data.

Owns the list: kernel function, argument types, constants, warps and stages. Does not compile.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from architectures import KIB, MAX_SHARED, capability
from gemm_tiles import CANDIDATES, FORMS, Tile, read_table, used_tiles

GROUPED_TILES = ("stream_64x16x128_s4_w4", "stream_128x128x64_s3_w8")
MAX_GROUPS = 256


@dataclass(frozen=True)
class Variant:
    """One compilation. `arguments`: name -> type of every argument that is not a constant
    (tensordesc<...>: a tensor map that the host makes, see engine/ops/cuda/tensor_maps.py);
    those in `aligned` are known to be multiples of 16 (pointers: bytes), which the compiler needs
    for 16-byte loads."""

    name: str
    module: str
    function: str
    arguments: dict[str, str]
    constants: dict[str, int | bool | str | None]
    num_warps: int
    num_stages: int
    aligned: frozenset[str] = field(default_factory=frozenset)
    may_spill: bool = False
    max_registers: int | None = None
    """A thread's; fewer than the compiler would take let more programs run at a time."""


def block_map(rows: int, columns: int, kind: str = "bf16", pair: bool = False) -> str:
    """The type of a tensor map; pair: of two matrices, half of the rows from each."""
    shape = f"2, {rows // 2}, {columns}" if pair else f"{rows}, {columns}"
    return f"tensordesc<{kind}[{shape}]>"


def gemm_variant(arch: str, form: str, tile: Tile, may_spill: bool) -> Variant:
    out = "fp32" if form == "fp32" else "bf16"
    pair = form == "silu_mul"
    early_start = capability(arch) >= 90
    sizes = dict.fromkeys(("M", "N", "K", "SEGMENT"), "i32")
    constants: dict[str, int | bool | str | None] = {
        "BLOCK_N": tile.block_n,
        "BLOCK_M": tile.block_m,
        "BLOCK_K": tile.block_k,
        "SILU_MUL": pair,
    }
    if tile.kernel == "stream":
        arguments = {"x": "*bf16", "w": "*bf16", "out": f"*{out}", **sizes}
        constants["EARLY_START"] = early_start
    else:
        main, extra = tile.parts
        columns = main // 2 if pair else main
        maps = {
            "x_map": block_map(tile.block_m, tile.block_k),
            "w_map": block_map(main, tile.block_k, pair=pair),
            "extra_map": block_map(extra, tile.block_k, pair=pair) if extra else None,
            "out_map": None if extra or out == "fp32" else block_map(tile.block_m, columns, out),
        }
        arguments = {name: kind for name, kind in maps.items() if kind is not None}
        arguments |= {"out": f"*{out}", **sizes}
        constants |= {name: None for name, kind in maps.items() if kind is None}
        constants |= {"BLOCK_N": main, "EXTRA_N": extra, "GROUP_M": 8}
        constants["EARLY_START"] = early_start and tile.early
    return Variant(
        name=f"gemm.{form}.{tile.name}",
        module="gemm",
        function=f"gemm_{tile.kernel}_kernel",
        arguments=arguments,
        constants=constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
        aligned=frozenset({"x", "w", "out", "K", "SEGMENT"} & arguments.keys()),
        may_spill=may_spill,
    )


def grouped_gemm_variants(arch: str) -> list[Variant]:
    """A tile for groups of few rows and one for larger ones."""
    found = []
    for form in ("bf16", "silu_mul"):
        for name in GROUPED_TILES:
            plain = gemm_variant(arch, form, Tile.parse(name), False)
            pointers = {"x": "*bf16", "w": "*bf16", "out": "*bf16", "group_starts": "*i32"}
            found.append(
                replace(
                    plain,
                    name=f"gemm_grouped.{form}.{name}",
                    function="gemm_grouped_kernel",
                    arguments=pointers | dict.fromkeys(("GROUPS", "N", "K"), "i32"),
                    constants=plain.constants | {"MAX_GROUPS": MAX_GROUPS},
                    aligned=frozenset({"x", "w", "out", "K"}),
                )
            )
    return found


def gemm_variants(arch: str, candidates: bool) -> list[Variant]:
    """With `candidates`, also what tuning tries, and every tile in use with fp32 outputs, in which
    equal bits show; some of those keep registers in memory."""
    used = used_tiles(read_table(arch))
    more: set[tuple[str, str]] = set()
    if candidates:
        more = {(form, name) for form in FORMS for name in CANDIDATES}
        more |= {("fp32", name) for _, name in used}
    return [
        gemm_variant(arch, form, Tile.parse(name), (form, name) not in used)
        for form, name in sorted(used | more)
    ]


def attention_prefill_variant(arch: str) -> Variant:
    """head dim 256. The KV tile is a constant of the architecture: it decides a row's bits."""
    large = MAX_SHARED[arch] >= 200 * KIB
    return Variant(
        name="attention_prefill",
        module="attention_prefill",
        function="attention_prefill_kernel",
        arguments={
            "q": "*bf16",
            "qgkv": "*bf16",
            "k_cache": "*bf16",
            "v_cache": "*bf16",
            "block_tables": "*i32",
            "cu_seqlens": "*i32",
            "start_positions": "*i32",
            "state_slots": "*i32",
            "out": "*bf16",
            "NUM_SEQS": "i32",
            "NQ": "i32",
            "NKV": "i32",
            "CACHE_ROWS": "i32",
            "BLOCK_SIZE": "i32",
            "MAX_BLOCKS": "i32",
        },
        constants={"D": 256, "TILE_M": 128 if large else 64, "TILE_N": 64 if large else 32},
        num_warps=8,
        num_stages=2,
        aligned=frozenset({"q", "qgkv", "k_cache", "v_cache", "out", "CACHE_ROWS", "BLOCK_SIZE"}),
    )


def delta_rule_variants(arch: str) -> list[Variant]:
    """K = V = 128."""
    large = MAX_SHARED[arch] >= 200 * KIB
    sequences = {"cu_seqlens": "*i32", "start_positions": "*i32"}
    acts = dict.fromkeys(("w", "u", "p"), "*bf16")
    fp32 = dict.fromkeys(("a", "t", "g", "beta", "q_scale", "w_scale", "carried"), "*fp32")
    sizes = {"HK": "i32", "HV": "i32"}

    def arguments(names: str, direction: str) -> dict[str, str]:
        kinds = acts | fp32
        return {f"{name}_{direction}": kinds[name] for name in names.split()}

    scores = Variant(
        name="delta_rule_scores",
        module="delta_rule_prefill",
        function="delta_rule_scores_kernel",
        arguments={
            "qkv": "*bf16",
            "qkvzba": "*bf16",
            "a_log": "*fp32",
            "dt_bias": "*fp32",
            **sequences,
            **arguments("a p g beta q_scale w_scale carried", "out"),
            "NUM_SEQS": "i32",
            "NUM_TOKENS": "i32",
            **sizes,
            "QKV_SIZE": "i32",
            "PROJECTION_SIZE": "i32",
        },
        constants={"K": 128},
        num_warps=4 if large else 8,
        num_stages=1,
        max_registers=128 if large else None,
        aligned=frozenset({"qkv", "qkvzba", "QKV_SIZE", "PROJECTION_SIZE", "a_out", "p_out"}),
    )
    solve = Variant(
        name="delta_rule_solve",
        module="delta_rule_prefill",
        function="delta_rule_solve_kernel",
        arguments={"a_and_t": "*fp32", **sequences, "NUM_SEQS": "i32", "NUM_TOKENS": "i32"},
        constants={},
        num_warps=2,
        num_stages=1,
        max_registers=168 if large else None,
        aligned=frozenset({"a_and_t"}),
    )
    products = Variant(
        name="delta_rule_products",
        module="delta_rule_prefill",
        function="delta_rule_products_kernel",
        arguments={
            "qkv": "*bf16",
            **arguments("t beta w_scale", "in"),
            **sequences,
            **arguments("w u", "out"),
            "NUM_SEQS": "i32",
            "NUM_TOKENS": "i32",
            **sizes,
            "QKV_SIZE": "i32",
        },
        constants={"K": 128, "V": 128},
        num_warps=4 if large else 8,
        num_stages=1,
        max_registers=168 if large else None,
        aligned=frozenset({"qkv", "QKV_SIZE", "t_in", "w_out", "u_out"}),
    )
    states = Variant(
        name="delta_rule_states",
        module="delta_rule_prefill",
        function="delta_rule_states_kernel",
        arguments={
            "qkv": "*bf16",
            **arguments("w u p g q_scale carried", "in"),
            **sequences,
            "state_slots": "*i32",
            "initial_slots": "*i32",
            "snapshot_starts": "*i32",
            "snapshot_positions": "*i32",
            "snapshot_slots": "*i32",
            "recurrent_state": "*fp32",
            "out": "*bf16",
            "NUM_TOKENS": "i32",
            **sizes,
            "QKV_SIZE": "i32",
        },
        constants={"K": 128, "V": 128, "SLICE": 32},
        num_warps=4,
        num_stages=3 if large else 2,
        aligned=frozenset({"qkv", "QKV_SIZE", "recurrent_state", "out"})
        | {f"{n}_in" for n in "wup"},
    )
    # with as many sequences as fill the card: fewer reads of what all slices of a head share
    wide = replace(
        states,
        name="delta_rule_states_wide",
        constants={"K": 128, "V": 128, "SLICE": 64 if large else 32},
        num_stages=1 if large else states.num_stages,
    )
    return [scores, solve, products, states, wide]


def all_variants(arch: str, candidates: bool = False) -> list[Variant]:
    return [
        *gemm_variants(arch, candidates),
        *grouped_gemm_variants(arch),
        attention_prefill_variant(arch),
        *delta_rule_variants(arch),
    ]
