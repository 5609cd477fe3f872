"""Where the kernel sources and compiled kernels lie. Owns the search, not the files' formats.

    installed:  .../deltaserve/engine/data_files.py    .../deltaserve/_data/cuda
    checkout:   ROOT/engine/data_files.py              ROOT/cuda

Found by path and not through `importlib.resources`, which cannot see a folder without `__init__.py`
that an editable install has mapped.
"""

from __future__ import annotations

from pathlib import Path


def find_data_dir(name: str) -> Path:
    """The folder `name` ("cuda" or "triton_aot") of this installation or checkout.

    Raises FileNotFoundError, naming both places that were searched, where there is none.
    """
    package = Path(__file__).resolve().parent.parent
    places = (package / "_data" / name, package / name)
    for place in places:
        if place.is_dir():
            return place
    searched = " or ".join(map(str, places))
    raise FileNotFoundError(f"deltaserve's {name} files are missing: no folder {searched}")
