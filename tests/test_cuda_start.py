"""What happens before a kernel is loaded: GPUs that cannot run them are refused, and a checkout's
edited .cu files are compiled."""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from deltaserve.engine.ops.cuda.checkout import refresh_cuda_kernels
from deltaserve.engine.ops.cuda.detect import Gpu, check_gpu

ROOT = Path(__file__).resolve().parent.parent
KERNEL = """
#include "scale.cuh"
extern "C" __global__ void double_kernel(float* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) x[i] *= SCALE;
}
"""


def manifest(nvrtc: str = "12.9") -> dict[str, Any]:
    return {"compilers": {"nvrtc": nvrtc}, "archs": {"sm_103": {}, "sm_90": {}, "sm_86": {}}}


@pytest.mark.parametrize(
    ("gpu", "nvrtc", "message"),
    [
        (Gpu("sm_75", 13_000), "12.9", r"this GPU is sm_75; .* for sm_86, sm_90, sm_103$"),
        (Gpu("sm_90", 11_080), "12.9", r"CUDA 11\.8; .* sm_86: 12\.0, sm_90: 12\.0, sm_103: 12\.9"),
        (Gpu("sm_103", 12_080), "12.9", r"CUDA 12\.8; .* sm_103: 12\.9"),
        (Gpu("sm_90", 12_090), "13.0", r"CUDA 12\.9; .* sm_90: 13\.0"),
    ],
)
def test_gpus_that_are_refused(gpu: Gpu, nvrtc: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_gpu(gpu, manifest(nvrtc))


@pytest.mark.parametrize("gpu", [Gpu("sm_90", 12_000), Gpu("sm_103", 12_090), Gpu("sm_86", 13_000)])
def test_gpus_that_are_not(gpu: Gpu) -> None:
    check_gpu(gpu, manifest())


def test_an_installation_is_never_compiled(tmp_path: Path) -> None:
    """In a folder that has no script to run either, which a checkout would stumble over."""
    for parent in ("_data", "checkout"):
        (tmp_path / parent / "triton_aot").mkdir(parents=True)
    refresh_cuda_kernels(tmp_path / "_data/triton_aot", "sm_90")
    with pytest.raises(ValueError, match="refresh_cuda"):
        refresh_cuda_kernels(tmp_path / "checkout/triton_aot", "sm_90")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The build scripts, one .cu file with a header, and a manifest that has a Triton kernel."""
    folder = tmp_path / "triton_aot"
    folder.mkdir()
    for path in (ROOT / "triton_aot").glob("*.py"):
        shutil.copy(path, folder)
    (tmp_path / "cuda/include").mkdir(parents=True)
    (tmp_path / "cuda/double.cu").write_text(KERNEL)
    (tmp_path / "cuda/include/scale.cuh").write_text("#define SCALE 2\n")
    kernels = {"gemm": {"file": "cubins/sm_90/gemm.cubin", "hash": "1"}}
    content = {"format": 1, "archs": {"sm_90": {"kernels": kernels, "gemm_tiles": {}}}}
    (folder / "manifest.json").write_text(json.dumps(content))
    return folder


def test_headers_of_the_compilers_version_are_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the wheels' folders of CUDA 12 and 13, else from a toolkit's."""
    monkeypatch.syspath_prepend(str(ROOT / "triton_aot"))
    cuda_headers = importlib.import_module("cuda_headers")
    monkeypatch.setattr(
        cuda_headers.importlib.util,
        "find_spec",
        lambda name: SimpleNamespace(submodule_search_locations=[tmp_path / name]),
    )
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "toolkit"))
    places = {
        13: tmp_path / "nvidia/cu13/include",
        12: tmp_path / "nvidia/cuda_runtime/include",
        11: tmp_path / "toolkit/include",
    }
    for major, place in places.items():
        place.mkdir(parents=True)
        (place / "cuda_bf16.h").touch()
        (place / "cuda.h").write_text(f"#define CUDA_VERSION {major}080\n")
    assert {major: cuda_headers.find_headers(major) for major in places} == places


def stale(folder: Path) -> str:
    code = (
        "import json, pathlib, refresh_cuda\n"
        "kernels = json.load(open('manifest.json'))['archs']['sm_90']['kernels']\n"
        "print(*refresh_cuda.stale_sources(kernels, 'sm_90', pathlib.Path()))"
    )
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout.strip()


def test_what_is_stale(checkout: Path) -> None:
    """Without a compiler: an entry and its file are put in place by hand."""
    assert stale(checkout) == "double.cu"
    code = "import manifest; print(manifest.cuda_hash('double.cu'))"
    command = [sys.executable, "-c", code]
    sources = subprocess.run(command, cwd=checkout, capture_output=True, text=True).stdout.strip()
    content = json.loads((checkout / "manifest.json").read_text())
    entry = {"file": "cubins/sm_90/double.cubin", "sources": sources}
    content["archs"]["sm_90"]["kernels"]["double"] = entry
    (checkout / "manifest.json").write_text(json.dumps(content))
    assert stale(checkout) == "double.cu"  # there is no such file
    (checkout / "cubins/sm_90").mkdir(parents=True)
    cubin = checkout / "cubins/sm_90/double.cubin"
    cubin.write_bytes(b"")
    assert stale(checkout) == ""
    (checkout.parent / "cuda/include/scale.cuh").write_text("#define SCALE 3\n")
    assert stale(checkout) == "double.cu"


@pytest.mark.aot
def test_edited_files_are_compiled_and_the_rest_is_kept(
    checkout: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    cubin = checkout / "cubins/sm_90/double.cubin"
    refresh_cuda_kernels(checkout, "sm_90")
    assert caplog.messages == ["compiled cuda/double.cu for sm_90"]
    kernels = json.loads((checkout / "manifest.json").read_text())["archs"]["sm_90"]["kernels"]
    assert kernels["gemm"] == {"file": "cubins/sm_90/gemm.cubin", "hash": "1"}
    assert kernels["double"]["signature"] == ["*fp32", "i32"]
    first, written = cubin.read_bytes(), cubin.stat().st_mtime_ns

    refresh_cuda_kernels(checkout, "sm_90")
    assert cubin.stat().st_mtime_ns == written

    (checkout.parent / "cuda/include/scale.cuh").write_text("#define SCALE 3\n")
    refresh_cuda_kernels(checkout, "sm_90")
    assert cubin.read_bytes() != first

    (checkout.parent / "cuda/double.cu").write_text(KERNEL.replace("x[i]", "y[i]"))
    with pytest.raises(ValueError, match=r'cuda/.*sm_90[^$]*identifier "y" is undefined'):
        refresh_cuda_kernels(checkout, "sm_90")
