"""BlockManager: which KV blocks are free and how often each used one is referenced.

Owns ids only; the arrays are in `cache`, and which sequence holds which block is in its
`block_table`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class BlockManager:
    """Block ids 0 .. num_blocks-1. The block that has been free longest is taken first."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0
        self._ref_counts = [0] * num_blocks
        self._free = deque(range(num_blocks))

    @property
    def num_blocks(self) -> int:
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return len(self._ref_counts) - len(self._free)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, each with one reference; the caller has checked `num_free`."""
        assert 0 <= count <= len(self._free), f"{count} blocks of {len(self._free)} free"
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Drops one reference of each block; the last one makes it free."""
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is free already"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)
