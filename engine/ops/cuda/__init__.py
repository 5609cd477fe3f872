"""The CUDA backend. CuPy is imported under this package alone."""
