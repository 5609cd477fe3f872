"""BlockManager: which KV blocks are free, how many hold each used one, and which are cached.

Owns ids only; the arrays are in `cache`, which sequence holds which block is in its `block_table`,
and what a hash is made of is the prefix cache's.

    used    at least one sequence holds it; may be registered
    cached  nobody holds it, but it is registered by the hash of what it holds: still free, and
            taken last, the one unused for longest first
    blank   nobody holds it and nothing finds it
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable


class BlockManager:
    """Block ids 0 .. num_blocks-1. Of blank blocks the one that is so for longest is taken first.

    `on_evict(hash)` is called when a registered block is taken for something else.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[bytes], None] | None = None) -> None:
        assert num_blocks > 0
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._blank = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()  # unused for longest first
        self._registered: dict[bytes, int] = {}
        self._on_evict = on_evict
        self.num_evictions = 0

    @property
    def num_blocks(self) -> int:
        return len(self._ref_counts)

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        return len(self._ref_counts) - self.num_free

    @property
    def num_cached(self) -> int:
        """Of the free ones, those that are registered."""
        return len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, each with one reference; the caller has checked `num_free`."""
        assert 0 <= count <= self.num_free, f"{count} blocks of {self.num_free} free"
        blocks = [self._blank.popleft() if self._blank else self._evict() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def free(self, blocks: Iterable[int]) -> None:
        """Drops one reference of each block; the last one makes it free. Of the cached ones the
        first given will be taken first."""
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} is free already"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] > 0:
                continue
            if self._hashes[block] is None:
                self._blank.append(block)
            else:
                self._cached[block] = None

    def is_used(self, block: int) -> bool:
        return self._ref_counts[block] > 0

    def find(self, block_hash: bytes) -> int | None:
        """The block registered by this hash."""
        return self._registered.get(block_hash)

    def share(self, blocks: Iterable[int]) -> None:
        """One reference more to each of these registered blocks."""
        for block in blocks:
            assert self._hashes[block] is not None, f"block {block} is not registered"
            if self._ref_counts[block] == 0:
                del self._cached[block]
            self._ref_counts[block] += 1

    def register(self, block_hash: bytes, block: int) -> None:
        """Makes a used block the one that is found by the hash, unless another used one is."""
        found = self._registered.get(block_hash)
        if found == block:
            return
        assert self._ref_counts[block] > 0 and self._hashes[block] is None
        if found is not None:
            if self._ref_counts[found] > 0:
                return
            del self._cached[found]
            self._hashes[found] = None
            self._blank.append(found)
        self._registered[block_hash] = block
        self._hashes[block] = block_hash

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        block_hash = self._hashes[block]
        assert block_hash is not None
        self._hashes[block] = None
        del self._registered[block_hash]
        self.num_evictions += 1
        if self._on_evict is not None:
            self._on_evict(block_hash)
        return block
