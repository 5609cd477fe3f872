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
from cuda_sources import CUDA, kernels, parse_signature, sources, tensor_maps  # noqa: E402
from gemm_tiles import FORMS, Tile, read_table, rows, used_tiles  # noqa: E402
from variants import all_variants, gemm_variant  # noqa: E402

from deltaserve.engine.ops.cuda.gemm import Gemm, named_tile  # noqa: E402
from deltaserve.engine.ops.cuda.kernels import Blocks, Grid  # noqa: E402

# (N, K) of the GEMMs of 0.8B to 27B that `linear_partials` cuts: out and down
CUT_SHAPES = [
    (1024, 2048), (1024, 3584), (2048, 2048), (2048, 6144), (2560, 4096), (2560, 9216),
    (4096, 4096), (4096, 12288), (5120, 6144), (5120, 17408),
]  # fmt: skip


class TableOnly:
    """The part of `Kernels` that choosing a tile needs, and what is launched."""

    num_multiprocessors = 1

    def __init__(self, arch: str) -> None:
        self.gemm_tiles = read_table(arch)
        self.grids: list[Grid] = []
        self.arguments: list[tuple[object, ...]] = []

    def launch(self, name: str, grid: Grid, threads: int, *args: object) -> None:
        self.grids.append(grid)
        self.arguments.append(args)


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
        for source in sources(arch):
            names = kernels((CUDA / source).read_text())
            compiled |= {name.removesuffix("_kernel") for name in names}
        gemm = Gemm(TableOnly(arch))  # type: ignore[arg-type]
        for form in FORMS:
            for n in (1024, 248_320):
                name = gemm.tile_name(form, n, 2560, m)
                assert named_tile(form, name).kernel in compiled
        for form, row in rows(gemm._table):
            assert {named_tile(form, name).kernel for name in row} <= compiled, (arch, form)


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
    with pytest.raises(ValueError, match="11 tiles"):
        read_table("sm_90")


def test_a_cluster_tile_is_two_blocks_that_take_maps() -> None:
    """Wide ones have a third warpgroup that copies, others a warp; both gates are one map."""
    tile = named_tile("bf16", "cluster_160x256")
    assert (tile.kernel, tile.cluster) == ("gemm_cluster_bf16_160x256", 2)
    assert (tile.columns, tile.rows, tile.block_k, tile.threads) == (160, 256, 64, 288)
    assert (tile.persistent, tile.maps, tile.gates) == (True, ("x", "w rows"), 1)
    gated = named_tile("silu_mul", "cluster_288x256")
    assert (gated.kernel, gated.columns, gated.gates) == ("gemm_cluster_silu_mul_288x256", 144, 2)
    assert (gated.threads, gated.maps) == (384, ("x", "w rows"))


@pytest.mark.parametrize(
    ("m", "multiprocessors", "blocks"), [(256, 132, 8), (257, 132, 16), (2560, 7, 6)]
)
def test_the_grid_of_cluster_tiles_is_two_blocks_a_tile_that_all_run_at_once(
    m: int, multiprocessors: int, blocks: int
) -> None:
    """4 column tiles; an odd multiprocessor is left over."""
    kernels = TableOnly("sm_90")
    kernels.num_multiprocessors = multiprocessors
    tile = named_tile("bf16", "cluster_160x256")
    x, weight, out = np.empty((m, 192)), np.empty((520, 192)), np.empty((m, 520))
    Gemm(kernels).launch_tile(tile, x, weight, out, 520, 192, 1)  # type: ignore[arg-type]
    assert kernels.grids == [(blocks, 1, 1)]


def test_a_cluster_tile_is_launched_with_maps_of_rows_and_of_both_gates() -> None:
    kernels = TableOnly("sm_90")
    tile = named_tile("silu_mul", "cluster_288x256")
    x, weight, out = np.empty((5, 192)), np.empty((80, 192)), np.empty((5, 40))
    Gemm(kernels).launch_tile(tile, x, weight, out, 40, 192, 1)  # type: ignore[arg-type]
    of_x, of_w, *rest = kernels.arguments[0]
    assert of_x == Blocks(x, (5, 192)) and of_w == Blocks(weight, (80, 192))
    assert rest == [out, 5, 40, 192, 192]


def test_signatures_are_read_from_the_source() -> None:
    text = "const bf16* __restrict__ x, float eps, int* ids, u64* keys, const float* w, int H"
    assert parse_signature(text) == ["*bf16", "fp32", "*i32", "*u64", "*fp32", "i32"]
    assert parse_signature("const __grid_constant__ TensorMap x, int M") == ["map", "i32"]


def test_the_cuts_of_tensor_maps_are_read_from_the_source() -> None:
    text = """
        TENSOR_MAP_ROWS(indented, 8, 8);
TENSOR_MAP_ROWS(gemm_a, 128, 80);
TENSOR_MAP_ROWS(gemm_b, 64, 256);
"""
    like = {"swizzle": 3, "elem_size": 2, "bare": True}
    assert tensor_maps(text) == {
        "gemm_a": [{"block_size": [128, 64], **like}, {"block_size": [80, 64], **like}],
        "gemm_b": [{"block_size": [64, 64], **like}, {"block_size": [256, 64], **like}],
    }
    assert tensor_maps("int x;") == {}


def test_an_architecture_has_the_files_of_all_and_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import cuda_sources

    for name in ("b.cu", "a.cu", "sm_90/c.cu", "sm_100/d.cu", "include/e.cuh", "sm_90/f.cuh"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setattr(cuda_sources, "CUDA", tmp_path)
    assert sources("sm_90") == ["a.cu", "b.cu", "sm_90/c.cu"]
    assert sources("sm_100") == ["a.cu", "b.cu", "sm_100/d.cu"]
    assert sources("sm_80") == ["a.cu", "b.cu"]


@pytest.mark.parametrize("arch", MAX_SHARED)
def test_every_cuda_file_has_a_kernel_and_no_name_is_taken_twice(arch: str) -> None:
    """Nor a file's name, which its cubin has."""
    names: list[str] = []
    paths = [CUDA / source for source in sources(arch)]
    for path in paths:
        found = kernels(path.read_text())
        assert found, path.name
        assert path.read_text().count("__global__") == len(found), path.name
        names += found
    assert len(set(names)) == len(names)
    assert len({path.stem for path in paths}) == len(paths)


def test_every_cuda_file_is_of_some_architecture() -> None:
    found = {source for arch in MAX_SHARED for source in sources(arch)}
    assert found == {path.relative_to(CUDA).as_posix() for path in CUDA.rglob("*.cu")}
