"""The NumPy backend: the reference for every kernel, and the way to run without a GPU."""

from .ops import NumpyOps

__all__ = ["NumpyOps"]
