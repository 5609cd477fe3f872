"""What holds for the blocks and snapshots of a scheduler between steps, whatever has happened."""

from __future__ import annotations

from collections import Counter

from deltaserve.engine.prefix_cache import PrefixCache
from deltaserve.engine.scheduler import Scheduler


def check_pools(scheduler: Scheduler) -> None:
    """Nothing is lost, held twice or found wrongly."""
    cache = scheduler.prefix_cache
    check_blocks(cache, Counter(b for seq in scheduler.sequences for b in seq.block_table))
    check_snapshots(cache, scheduler.capacity.num_state_slots)


def check_blocks(cache: PrefixCache, holders: Counter[int]) -> None:
    blocks = cache.blocks
    every = range(blocks.num_blocks)
    assert blocks._ref_counts == [holders[block] for block in every], "one reference a holder"
    used = {block for block in every if holders[block]}
    blank, cached = list(blocks._blank), list(blocks._cached)
    assert sorted([*used, *blank, *cached]) == list(every), "each is used, blank or cached"
    hashes = {block: h for block, h in enumerate(blocks._hashes) if h is not None}
    assert {h: block for block, h in hashes.items()} == blocks._registered
    assert len(hashes) == len(blocks._registered)
    assert all(block in hashes for block in cached)
    assert not any(block in hashes for block in blank)
    children = {(p, c) for p, found in cache._children.items() for c in found}
    assert children == {(p, c) for c, p in cache._parents.items()}
    assert cache._parents.keys() <= blocks._registered.keys()
    assert not cache._prefilled and not cache._written


def check_snapshots(cache: PrefixCache, first_slot: int) -> None:
    pool = cache.snapshots
    slots = sorted([*pool._free, *pool._slots.values()])
    assert slots == list(range(first_slot, first_slot + pool.num_slots)), "each is free or found"
    assert not pool._pinned
    for prefix_hash in pool._slots:
        while True:
            assert cache.blocks.find(prefix_hash) is not None, "the whole prefix is there"
            if prefix_hash not in cache._parents:
                break
            prefix_hash = cache._parents[prefix_hash]
