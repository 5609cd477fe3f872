"""Kernel-sized operations: the protocol in `base`, one sub-package per backend."""
