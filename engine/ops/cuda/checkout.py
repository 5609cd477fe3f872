"""In a checkout, the .cu files that were edited are compiled when the engine starts. An
installation is never changed."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

logger = logging.getLogger(__name__)


def refresh_cuda_kernels(folder: Path, arch: str) -> None:
    """Runs triton_aot/refresh_cuda.py of the checkout that `folder` (its triton_aot) belongs to, in
    a process of its own: what compiles kernels is no part of the engine.

    Nothing in an installation, whose folder lies in `_data`. Raises ValueError with the compiler's
    messages.
    """
    if folder.parent.name == "_data":
        return
    command = [sys.executable, str(folder / "refresh_cuda.py"), "--arch", arch]
    done = subprocess.run([*command, "--out", str(folder)], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(
            f"cuda/*.cu is newer than its cubins (make aot) and could not be compiled for {arch}:"
            f" {done.stderr.strip()}"
        )
    for source in done.stdout.split():
        logger.info("compiled cuda/%s for %s", source, arch)
