"""What a user gets from `pip install`: the wheel is built from a copy of the sources, installed
with its dependencies alone into an empty environment, and used from there."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from .tiny_checkpoint import write_checkpoint, write_tokenizer

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ("engine", "server", "cuda", "triton_aot")
KERNEL_FILES = {"cuda": {".cu", ".cuh", ".md"}, "triton_aot/kernels": {".py"}}

pytestmark = pytest.mark.slow


def run(*command: str | Path, cwd: Path) -> str:
    """The command's output; without this checkout's PYTHONPATH, so that it sees installed files."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution of a copy with compiled kernels beside it."""
    tree = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__", "cubins", "manifest.json")
    for folder in (*SHIPPED, "tests", "tools"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    (tree / "triton_aot/cubins/sm_90").mkdir(parents=True)
    (tree / "triton_aot/cubins/sm_90/some_kernel.cubin").write_bytes(b"\x7fELF")
    (tree / "triton_aot/manifest.json").write_text("{}")
    run(sys.executable, "-m", "build", "--no-isolation", cwd=tree)
    return next((tree / "dist").glob("*.whl"))


@pytest.fixture(scope="module")
def contents(wheel: Path) -> set[str]:
    """The wheel's files below `deltaserve/`."""
    names = zipfile.ZipFile(wheel).namelist()
    return {
        name.removeprefix("deltaserve/")
        for name in names
        if not name.startswith("deltaserve-")  # the .dist-info folder
    }


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `bin` folder of an environment that holds the wheel and what it requires, no more."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin/python"
    pins = ROOT / "requirements/constraints.txt"
    pip = (sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-compile")
    run(*pip, "-c", pins, wheel, cwd=folder)
    return folder / "bin"


def test_the_wheel_holds_every_module(contents: set[str]) -> None:
    for folder in ("engine", "server"):
        expected = {path.relative_to(ROOT).as_posix() for path in (ROOT / folder).rglob("*.py")}
        assert expected | {f"{folder}/py.typed"} == {
            name for name in contents if name.startswith(f"{folder}/")
        }


def test_the_wheel_holds_kernel_sources_and_compiled_kernels(contents: set[str]) -> None:
    expected = {"triton_aot/cubins/sm_90/some_kernel.cubin", "triton_aot/manifest.json"}
    for folder, suffixes in KERNEL_FILES.items():
        files = (ROOT / folder).rglob("*")
        expected |= {f.relative_to(ROOT).as_posix() for f in files if f.suffix in suffixes}
    assert {f"_data/{name}" for name in expected} <= contents


def test_the_wheel_holds_nothing_else(contents: set[str]) -> None:
    assert {name.split("/")[0] for name in contents} == {"engine", "server", "_data"}
    cuda = {Path(name).suffix for name in contents if name.startswith("_data/cuda/")}
    assert cuda <= KERNEL_FILES["cuda"]


def test_the_command_answers_its_version(wheel: Path, environment: Path) -> None:
    version = wheel.name.split("-")[1]
    assert version in run(environment / "deltaserve", "--version", cwd=environment)


def test_the_installed_package_finds_its_data(environment: Path) -> None:
    code = (
        "from deltaserve.engine.data_files import find_data_dir as find\n"
        "print(find('cuda'), find('triton_aot'), sep='\\n')"
    )
    for line in run(environment / "python", "-c", code, cwd=environment).splitlines():
        assert Path(line).parent.name == "_data"
        assert Path(line).is_relative_to(environment.parent)


def test_engine_and_server_import_without_extras(environment: Path) -> None:
    code = (
        "import importlib.util\n"
        "import deltaserve.engine.llm, deltaserve.server.app, deltaserve.server.cli\n"
        "extras = ['cupy', 'torch', 'triton', 'transformers', 'pytest']\n"
        "print([name for name in extras if importlib.util.find_spec(name)])"
    )
    assert run(environment / "python", "-c", code, cwd=environment).strip() == "[]"


def test_the_installed_engine_generates(environment: Path, tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    write_tokenizer(tmp_path)
    code = (
        "from deltaserve.engine.llm import LLM\n"
        "from deltaserve.engine.sampling_params import SamplingParams\n"
        "params = SamplingParams(max_tokens=5, ignore_eos=True)\n"
        f"with LLM({str(tmp_path)!r}, device='cpu') as llm:\n"
        "    print(len(llm.generate('a prompt', params)[0].token_ids))"
    )
    assert run(environment / "python", "-c", code, cwd=environment).strip() == "5"
