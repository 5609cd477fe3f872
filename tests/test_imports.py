"""Who may import whom (CONTRIBUTING, "Import rules"), read from the source; and what importing the
product loads, seen in a fresh interpreter."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
CONFIGURATION = {
    "capacity",
    "config",
    "grammar",
    "json_section",
    "sampling_params",
    "sequence",
}
PLANNING = {
    "block_manager",
    "prefill_chunks",
    "prefix_cache",
    "request_queue",
    "scheduled_batch",
    "scheduler",
    "snapshot_pool",
    "state_manager",
    "step_outputs",
}
MODEL_VIEW = {"ops.base", "config", "forward_batch", "cache"}


def module_name(path: Path) -> str:
    """engine/ops/base.py -> deltaserve.engine.ops.base"""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(("deltaserve", *(part for part in parts if part != "__init__")))


def sources(*folders: str) -> dict[str, Path]:
    """Module name -> file, of every Python file under the folders."""
    return {module_name(path): path for folder in folders for path in (ROOT / folder).rglob("*.py")}


MODULES = sources("engine", "server")


def imports(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """The dotted names that a module imports, at any depth of its code, relative ones resolved.

    `from . import cache` gives `<package>.cache` if that is a module of ours.
    """
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")
            base = parents[: len(parents) - node.level + 1] if node.level else []
            source = ".".join([*base, *filter(None, [node.module])])
            for alias in node.names:
                submodule = f"{source}.{alias.name}"
                yield submodule if submodule in MODULES else source


def imported_by(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(), str(path))
    return set(imports(tree, module_name(path), path.name == "__init__.py"))


def top(name: str) -> str:
    return name.partition(".")[0]


def within(name: str, *packages: str) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def offences(names: set[str], allowed: set[str]) -> set[str]:
    """What is neither of the standard library nor one of the engine modules in `allowed`."""
    return {
        name
        for name in names
        if top(name) not in sys.stdlib_module_names
        and name not in {f"deltaserve.engine.{module}" for module in allowed}
    }


@pytest.mark.parametrize(
    ("line", "module", "is_package", "expected"),
    [
        ("import cupy.cuda", "deltaserve.engine.cache", False, "cupy.cuda"),
        ("from ..server import x", "deltaserve.engine.cache", False, "deltaserve.server"),
        ("from .. import server", "deltaserve.engine.cache", False, "deltaserve.server"),
        ("from . import cache", "deltaserve.engine", True, "deltaserve.engine.cache"),
        ("from .base import Ops", "deltaserve.engine.ops", True, "deltaserve.engine.ops.base"),
        ("def f():\n    import torch", "deltaserve.engine.cache", False, "torch"),
    ],
)
def test_imports_are_resolved(line: str, module: str, is_package: bool, expected: str) -> None:
    assert list(imports(ast.parse(line), module, is_package)) == [expected]


@pytest.mark.parametrize("module", sorted(CONFIGURATION))
def test_configuration_needs_the_standard_library_alone(module: str) -> None:
    assert not offences(imported_by(ROOT / f"engine/{module}.py"), CONFIGURATION)


@pytest.mark.parametrize("module", sorted(PLANNING))
def test_scheduling_needs_no_arrays(module: str) -> None:
    assert not offences(imported_by(ROOT / f"engine/{module}.py"), CONFIGURATION | PLANNING)


def test_models_see_the_ops_protocol_and_no_backend() -> None:
    for name, path in sources("engine/models").items():
        ours = {name for name in imported_by(path) if top(name) == "deltaserve"}
        models = {name for name in ours if within(name, "deltaserve.engine.models")}
        assert not offences(ours - models, MODEL_VIEW), name


def test_the_loader_alone_chooses_a_backend() -> None:
    backends = ("deltaserve.engine.ops.numpy", "deltaserve.engine.ops.cuda")
    for name, path in MODULES.items():
        if name != "deltaserve.engine.model_loader" and not within(name, *backends):
            assert not [used for used in imported_by(path) if within(used, *backends)], name


def test_cupy_is_imported_by_the_cuda_ops_alone() -> None:
    for name, path in MODULES.items():
        if not within(name, "deltaserve.engine.ops.cuda"):
            assert not {"cupy", "cupy_backends", "cuda"} & set(map(top, imported_by(path))), name


def test_torch_is_a_test_dependency_and_triton_a_build_dependency() -> None:
    for name, path in sources("engine", "server", "triton_aot").items():
        imported = set(map(top, imported_by(path)))
        assert not {"torch", "transformers"} & imported, name
        assert "triton" not in imported or within(name, "deltaserve.triton_aot"), name


def test_product_code_imports_downwards() -> None:
    for name, path in sources("engine", "server", "triton_aot").items():
        imported = imported_by(path)
        assert not {"tools", "tests"} & set(map(top, imported)), name
        if within(name, "deltaserve.engine"):
            assert not [used for used in imported if within(used, "deltaserve.server")], name


def test_packages_import_themselves_relatively() -> None:
    for name, path in MODULES.items():
        package = ".".join(name.split(".")[:2])
        for node in ast.walk(ast.parse(path.read_text())):
            absolute = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                absolute = [node.module or ""]
            own = [used for used in absolute if within(used, package, "engine", "server")]
            assert not own, name


def test_the_cuda_folder_cannot_shadow_nvidias_package() -> None:
    """On sys.path it would merge with the namespace package `cuda`, of which CuPy imports parts."""
    names = [path.relative_to(ROOT).as_posix() for path in (ROOT / "cuda").rglob("*")]
    assert [name for name in names if name.endswith(".py")] == []
    assert {"cuda/bindings", "cuda/core", "cuda/pathfinder"}.isdisjoint(names)


def test_every_package_is_listed_for_the_wheel() -> None:
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders = {
        name if path.name == "__init__.py" else name.rpartition(".")[0]
        for name, path in MODULES.items()
    }
    assert folders == {name for name in setuptools["packages"] if "._data." not in name}


def loaded_by(code: str) -> set[str]:
    """The top-level modules that a fresh interpreter holds after `code`."""
    report = "\nimport json, sys; print(json.dumps(sorted({m.split('.')[0] for m in sys.modules})))"
    done = subprocess.run(
        [sys.executable, "-c", code + report], cwd=ROOT / "tests", capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_importing_everything_but_the_cuda_ops_loads_no_gpu_package() -> None:
    modules = [name for name in MODULES if not within(name, "deltaserve.engine.ops.cuda")]
    loaded = loaded_by(f"import importlib\nfor m in {modules}: importlib.import_module(m)")
    assert "numpy" in loaded
    assert not loaded & {"cupy", "cupy_backends", "torch", "triton", "transformers"}


def test_the_version_is_answered_without_loading_the_product() -> None:
    """What keeps `deltaserve --version` under half a second."""
    loaded = loaded_by(
        "import sys\nfrom deltaserve.server.cli import main\nsys.argv = ['deltaserve', '--version']"
        "\ntry: main()\nexcept SystemExit as end: assert not end.code, end"
    )
    assert not loaded & {"numpy", "tokenizers", "starlette", "uvloop", "zmq", "msgspec", "jinja2"}
