"""The ahead-of-time build without compiling: tables of tiles, what is refused, signatures."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "triton_aot"))

from architectures import MAX_SHARED  # noqa: E402
from cuda_sources import CUDA, kernels, parse_signature  # noqa: E402
from gemm_tiles import FORMS, Tile, read_table, used_tiles  # noqa: E402
from variants import all_variants, gemm_variant  # noqa: E402

from deltaserve.engine.ops.cuda.gemm import Gemm, named_tile  # noqa: E402
from deltaserve.engine.ops.cuda.kernels import Grid  # noqa: E402

# (N, K) of the GEMMs of 0.8B to 27B that `linear_partials` cuts: out and down
CUT_SHAPES = [
    (1024, 2048), (1024, 3584), (2048, 2048), (2048, 6144), (2560, 4096), (2560, 9216),
    (4096, 4096), (4096, 12288), (5120, 6144), (5120, 17408),
]  # fmt: skip


class TableOnly:
    """The part of `Kernels` that choosing a tile needs, and the grids of what is launched."""

    num_multiprocessors = 1

    def __init__(self, arch: str) -> None:
        self.gemm_tiles = read_table(arch)
        self.grids: list[Grid] = []

    def launch(self, name: str, grid: Grid, threads: int, *args: object) -> None:
        self.grids.append(grid)


@pytest.mark.parametrize("arch", MAX_SHARED)
def test_operands_of_every_tile_in_use_fit_the_architecture(arch: str) -> None:
    """A lower bound of what the compiler will ask for: stages of both bf16 operands."""
    for _, name in used_tiles(read_table(arch)):
        tile = Tile.parse(name)
        stages = tile.stages * (tile.block_n + tile.block_m) * tile.block_k * 2
        assert stages <= MAX_SHARED[arch], (arch, name)


@pytest.mark.parametrize("arch", MAX_SHARED)
def test_segments_of_k_are_whole_blocks_of_every_tile(arch: str) -> None:
    gemm = Gemm(TableOnly(arch))  # type: ignore[arg-type]
    for n, k in CUT_SHAPES:
        segments = gemm.num_segments(n, k)
        segment = -(-k // segments // 128) * 128
        assert 1 <= segments <= 4 and (segments - 1) * segment < k
        for m in (1, 17, 64, 256):
            tile = named_tile("fp32", gemm.tile_name("fp32", n, k, m))
            assert k % tile.block_k == 0 and segment % tile.block_k == 0


def test_measured_segments_override_the_rule() -> None:
    gemm = Gemm(TableOnly("sm_90"))  # type: ignore[arg-type]
    measured = read_table("sm_90")["segments"]["shapes"]
    assert {"2560x4096", "2560x9216"} <= set(measured)
    for shape, segments in measured.items():
        assert gemm.num_segments(*map(int, shape.split("x"))) == segments


@pytest.mark.parametrize("m", [1, 16, 17, 64, 65, 8192])
def test_every_choice_of_a_table_is_compiled(m: int) -> None:
    for arch in MAX_SHARED:
        compiled = {variant.name for variant in all_variants(arch)}
        compiled |= {
            n.removesuffix("_kernel") for n in kernels((CUDA / "gemm_decode.cu").read_text())
        }
        gemm = Gemm(TableOnly(arch))  # type: ignore[arg-type]
        for form in FORMS:
            for n in (1024, 248_320):
                name = gemm.tile_name(form, n, 2560, m)
                assert named_tile(form, name).kernel in compiled


def test_a_tile_is_one_or_two_powers_of_two_wide() -> None:
    for width, parts in ((128, (128, 0)), (288, (256, 32)), (96, (64, 32)), (144, (128, 16))):
        assert Tile("persistent", width, 64, 64, 4, 4).parts == parts
    with pytest.raises(ValueError, match="112 rows"):
        _ = Tile("persistent", 112, 64, 64, 4, 4).parts


def test_the_options_of_a_persistent_tile_are_in_its_name() -> None:
    for name, early, programs in (
        ("persistent_144x64x64_s7_w4", False, 1),
        ("persistent_144x64x64_s7_w4_early", True, 1),
        ("persistent_32x64x128_s4_w4_x2", False, 2),
        ("persistent_32x64x128_s4_w4_early_x2", True, 2),
    ):
        tile = Tile.parse(name)
        assert (tile.early, tile.programs, tile.name) == (early, programs, name)
        assert named_tile("fp32", name).programs == programs
        for arch, starts_early in (("sm_89", False), ("sm_90", early)):
            variant = gemm_variant(arch, "fp32", tile, False)
            assert variant.constants["EARLY_START"] == starts_early
    with pytest.raises(ValueError, match="only persistent"):
        Tile.parse("stream_64x16x128_s4_w4_early")


@pytest.mark.parametrize(("options", "programs"), [("", 5), ("_x2", 10), ("_early_x2", 10)])
def test_a_persistent_grid_has_so_many_programs_a_multiprocessor(
    options: str, programs: int
) -> None:
    kernels = TableOnly("sm_90")
    kernels.num_multiprocessors = 5
    tile = named_tile("fp32", f"persistent_32x64x128_s4_w4{options}")
    x, weight, out = np.empty((64, 256)), np.empty((640, 256)), np.empty((1, 64, 640))
    Gemm(kernels).launch_tile(tile, x, weight, out, 640, 256, 1)  # type: ignore[arg-type]
    assert kernels.grids == [(programs, 1, 1)]


def test_a_launch_passes_a_tensor_map_for_each_that_the_kernel_takes() -> None:
    """What variants.py declares against what gemm.py passes."""
    for variant in all_variants("sm_90"):
        if variant.function == "gemm_persistent_kernel":
            _, form, name = variant.name.split(".")
            maps = [n for n, kind in variant.arguments.items() if kind.startswith("tensordesc")]
            passed = [f"{n}_map" for n in named_tile(form, name).maps]
            if passed.count("w_map") == 2:
                passed[passed.index("w_map") + 1] = "extra_map"
            assert maps == passed, variant.name


def test_a_table_with_a_short_row_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gemm_tiles

    table = read_table("sm_90")
    table["shapes"]["bf16:64x64"] = ["stream_64x16x128_s4_w4"]
    (tmp_path / "tiles").mkdir()
    (tmp_path / "tiles" / "sm_90.json").write_text(json.dumps(table))
    monkeypatch.setattr(gemm_tiles, "__file__", str(tmp_path / "gemm_tiles.py"))
    with pytest.raises(ValueError, match="10 tiles"):
        read_table("sm_90")


def test_signatures_are_read_from_the_source() -> None:
    text = "const bf16* __restrict__ x, float eps, int* ids, u64* keys, const float* w, int H"
    assert parse_signature(text) == ["*bf16", "fp32", "*i32", "*u64", "*fp32", "i32"]


def test_every_cuda_file_has_a_kernel_and_no_name_is_taken_twice() -> None:
    names: list[str] = []
    for path in sorted(CUDA.glob("*.cu")):
        found = kernels(path.read_text())
        assert found, path.name
        assert path.read_text().count("__global__") == len(found), path.name
        names += found
    assert len(set(names)) == len(names)
