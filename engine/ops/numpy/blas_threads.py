"""How many threads NumPy's BLAS uses, set at run time.

The matrix products of a small model are too short to share: OpenBLAS's threads spin between them,
and on a machine where anything else runs that costs more than the second thread brings.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np

ENVIRONMENT = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS")
SMALL_MODEL_BYTES = 256 << 20
"""Below this one thread is at least as fast."""


def limit_blas_threads(weight_bytes: int) -> int | None:
    """One thread for a small model; otherwise, or if the environment says how many, no change.

    Returns the number set, None where nothing was changed (or NumPy came with another BLAS).
    """
    if weight_bytes >= SMALL_MODEL_BYTES or any(name in os.environ for name in ENVIRONMENT):
        return None
    setter = _find_setter()
    if setter is None:
        return None
    setter(1)
    return 1


def _find_setter() -> Callable[[int], None] | None:
    """`openblas_set_num_threads` of the library inside NumPy's wheel, which is loaded already."""
    libraries = Path(np.__file__).parent.with_name("numpy.libs")
    for path in sorted(libraries.glob("lib*openblas*")):
        library = ctypes.CDLL(str(path))
        for prefix in ("scipy_openblas", "openblas"):
            for suffix in ("64_", ""):
                name = f"{prefix}_set_num_threads{suffix}"
                setter: Callable[[int], None] | None = getattr(library, name, None)
                if setter is not None:
                    return setter
    return None
