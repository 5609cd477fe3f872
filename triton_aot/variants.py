"""Every Triton kernel that is compiled for an architecture, as plain data.

Owns the list: kernel function, argument types, constants, warps and stages. Does not compile.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from gemm_tiles import FORMS, Tile, read_table, used_tiles

# Tiles that tools/tune_gemm.py tries besides those in use; compiled with --candidates.
CANDIDATES = (
    "stream_64x16x64_s6_w4",
    "stream_64x16x128_s3_w4",
    "stream_64x16x128_s4_w4",
    "stream_64x16x128_s6_w4",
    "stream_64x16x256_s3_w4",
    "stream_64x16x256_s3_w8",
    "stream_128x16x64_s6_w4",
    "stream_128x16x128_s4_w4",
    "stream_128x16x128_s3_w8",
    "stream_64x32x128_s4_w4",
    "stream_64x32x256_s3_w4",
    "stream_128x32x128_s4_w8",
    "stream_64x64x64_s6_w4",
    "stream_64x64x128_s4_w4",
    "stream_128x64x64_s4_w4",
    "stream_128x64x128_s3_w8",
    "stream_64x128x64_s4_w4",
    "stream_128x128x64_s4_w8",
    "persistent_64x64x128_s4_w4",
    "persistent_128x64x64_s6_w4",
    "persistent_128x64x128_s3_w4",
    "persistent_64x128x64_s6_w4",
    "persistent_64x128x128_s4_w4",
    "persistent_128x128x64_s4_w8",
    "persistent_128x128x64_s5_w8",
    "persistent_128x128x128_s3_w8",
    "persistent_256x64x64_s4_w4",
    "persistent_256x128x64_s3_w8",
    "persistent_128x256x64_s3_w8",
)


@dataclass(frozen=True)
class Variant:
    """One compilation. `arguments`: name -> type of every argument that is not a constant;
    those in `aligned` are known to be multiples of 16 (pointers: bytes), which the compiler needs
    for 16-byte loads."""

    name: str
    module: str
    function: str
    arguments: dict[str, str]
    constants: dict[str, int | bool | str]
    num_warps: int
    num_stages: int
    aligned: frozenset[str] = field(default_factory=frozenset)


def gemm_variant(form: str, tile: Tile) -> Variant:
    constants: dict[str, int | bool | str] = {
        "BLOCK_N": tile.block_n,
        "BLOCK_M": tile.block_m,
        "BLOCK_K": tile.block_k,
        "SILU_MUL": form == "silu_mul",
    }
    if tile.kernel == "persistent":
        constants["GROUP_M"] = 8
    out = "*fp32" if form == "fp32" else "*bf16"
    return Variant(
        name=f"gemm.{form}.{tile.name}",
        module="gemm",
        function=f"gemm_{tile.kernel}_kernel",
        arguments={
            "x": "*bf16",
            "w": "*bf16",
            "out": out,
            "M": "i32",
            "N": "i32",
            "K": "i32",
            "SEGMENT": "i32",
        },
        constants=constants,
        num_warps=tile.warps,
        num_stages=tile.stages,
        aligned=frozenset({"x", "w", "out", "K", "SEGMENT"}),
    )


def gemm_variants(arch: str, candidates: bool) -> list[Variant]:
    chosen = used_tiles(read_table(arch))
    if candidates:
        chosen |= {
            (form, name)
            for form in FORMS
            for name in CANDIDATES
            # fp32 tiles of 256 x 128 are stored through registers that are not there
            if form != "fp32" or Tile.parse(name).block_n * Tile.parse(name).block_m <= 128 * 128
        }
    return [gemm_variant(form, Tile.parse(name)) for form, name in sorted(chosen)]


def all_variants(arch: str, candidates: bool = False) -> list[Variant]:
    return gemm_variants(arch, candidates)
