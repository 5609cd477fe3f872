"""The installed version, from the package's own metadata."""

from __future__ import annotations

import functools


@functools.cache
def version() -> str:
    from importlib import metadata

    return metadata.version("deltaserve")
