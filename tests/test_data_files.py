"""`find_data_dir` in a checkout; the installed case is in test_wheel.py."""

from __future__ import annotations

from pathlib import Path

import pytest

from deltaserve.engine.data_files import find_data_dir

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize("name", ["cuda", "triton_aot"])
def test_a_checkout_uses_its_own_folders(name: str) -> None:
    assert find_data_dir(name) == ROOT / name


def test_a_missing_folder_is_named_with_the_places_searched() -> None:
    with pytest.raises(FileNotFoundError, match=r"no_such_kernels.*_data/no_such_kernels or "):
        find_data_dir("no_such_kernels")
