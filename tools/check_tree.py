"""What `make lint` holds beyond ruff and mypy, over the files that git knows.

A source file stays under MAX_LINES (a longer one is missing a name for one of its parts), and no
file names a directory of somebody's machine.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

MAX_LINES = 350
SOURCE_SUFFIXES = {".py", ".cu", ".cuh"}
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:home|root|Users|work|mnt|scratch)/\w")


def complaints(path: str, text: str) -> list[str]:
    """One line for each thing that is wrong with a file."""
    lines = text.splitlines()
    found = [
        f"{path}:{number}: names a directory of one machine"
        for number, line in enumerate(lines, 1)
        if MACHINE_PATH.search(line)
    ]
    if Path(path).suffix in SOURCE_SUFFIXES and len(lines) > MAX_LINES:
        found.append(f"{path}: {len(lines)} lines, more than {MAX_LINES}")
    return found


def main() -> int:
    root = Path(__file__).resolve().parent.parent
    listing = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(listing, cwd=root, capture_output=True, check=True, text=True).stdout
    found: list[str] = []
    for name in filter(None, names.split("\0")):
        try:
            found += complaints(name, (root / name).read_text())
        except (UnicodeDecodeError, FileNotFoundError):
            continue  # binary, or deleted and not yet committed
    print("\n".join(found) or "check_tree: nothing found")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
