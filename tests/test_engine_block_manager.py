"""Block ids: none is handed out twice, none is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltaserve.engine.block_manager import BlockManager


def test_allocates_what_has_been_free_longest() -> None:
    blocks = BlockManager(4)
    assert blocks.allocate(3) == [0, 1, 2]
    blocks.free([1])
    assert blocks.allocate(2) == [3, 1]


def test_allocating_more_than_is_free_is_our_bug_and_takes_nothing() -> None:
    blocks = BlockManager(2)
    blocks.allocate(1)
    with pytest.raises(AssertionError, match="2 blocks of 1 free"):
        blocks.allocate(2)
    assert blocks.num_free == 1


def test_freeing_twice_is_our_bug() -> None:
    blocks = BlockManager(2)
    (block,) = blocks.allocate(1)
    blocks.free([block])
    with pytest.raises(AssertionError, match=f"block {block} is free already"):
        blocks.free([block])


@given(
    num_blocks=st.integers(1, 12),
    steps=st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60),
)
def test_used_and_free_blocks_partition_the_pool(
    num_blocks: int, steps: list[tuple[bool, int]]
) -> None:
    blocks = BlockManager(num_blocks)
    held: list[int] = []
    for allocate, count in steps:
        if allocate:
            held += blocks.allocate(min(count, blocks.num_free))
        else:
            blocks.free(held[:count])
            del held[:count]
        assert len(set(held)) == len(held) == blocks.num_used
        assert blocks.num_used + blocks.num_free == blocks.num_blocks == num_blocks
    blocks.free(held)
    assert sorted(blocks.allocate(num_blocks)) == list(range(num_blocks))
