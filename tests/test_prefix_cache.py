"""PrefixCache, SnapshotPool and the blocks they are tied to, without a scheduler."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from deltaserve.engine.block_manager import BlockManager
from deltaserve.engine.capacity import Capacity
from deltaserve.engine.prefix_cache import PrefixCache, PrefixMatch, hash_blocks
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.sequence import Sequence
from deltaserve.engine.snapshot_pool import SnapshotPool

from .prefix_cache_checks import check_blocks, check_snapshots

FIRST_SLOT = 4


def make_cache(num_blocks: int = 20, num_snapshots: int = 6, interval: int = 1024) -> PrefixCache:
    return PrefixCache(
        Capacity(
            num_blocks=num_blocks,
            block_size=64,
            num_state_slots=FIRST_SLOT,
            max_model_len=1024,
            max_num_batched_tokens=1024,
            prefill_chunk=1024,
            max_queue=8,
            num_snapshots=num_snapshots,
            snapshot_interval=interval,
        )
    )


def prompt_seq(*pieces: tuple[int, int], salt: str | None = None) -> Sequence:
    """A prompt of pieces (kind, tokens)."""
    ids = tuple(1000 * kind + i for kind, length in pieces for i in range(length))
    return Sequence("", ids, SamplingParams(cache_salt=salt))


def compute(cache: PrefixCache, seq: Sequence, chunk: int = 1024) -> list[int]:
    """Admits and prefills as the scheduler does; the positions of the snapshots written."""
    match = cache.match(seq)
    cache.adopt(seq, match)
    positions = []
    while seq.num_computed_tokens < len(seq.prompt_ids):
        start = seq.num_computed_tokens
        end = min(start + chunk, len(seq.prompt_ids))
        seq.block_table += cache.blocks.allocate(-(-end // 64) - len(seq.block_table))
        positions += [position for position, _ in cache.prefill(seq, start, end)]
        seq.num_computed_tokens = end
        cache.end_step()
    return positions


def release(cache: PrefixCache, seq: Sequence) -> None:
    cache.blocks.free(reversed(seq.block_table))
    seq.block_table.clear()


def found(cache: PrefixCache, *pieces: tuple[int, int]) -> tuple[int, int]:
    match = cache.match(prompt_seq(*pieces))
    return match.num_tokens, match.num_kv_tokens


class TestSnapshotPositions:
    def test_the_last_boundaries_before_tail_and_question(self) -> None:
        cache = make_cache(num_blocks=60)
        lengths = {79: [], 80: [64], 143: [64], 144: [128], 319: [256], 320: [64, 256]}
        lengths |= {399: [128, 320], 400: [128, 384]}
        for kind, (length, positions) in enumerate(lengths.items()):
            assert compute(cache, prompt_seq((kind, length))) == positions

    def test_multiples_of_the_interval(self) -> None:
        cache = make_cache(interval=128)
        assert compute(cache, prompt_seq((1, 500))) == [128, 192, 256, 384, 448]

    def test_where_a_prompt_leaves_cached_blocks(self) -> None:
        cache = make_cache()
        compute(cache, prompt_seq((1, 300), (2, 300)))
        assert compute(cache, prompt_seq((1, 300), (3, 300))) == [256, 320, 576]
        assert found(cache, (1, 300), (4, 10)) == (256, 256)

    def test_none_more_for_a_prompt_whose_blocks_are_all_cached(self) -> None:
        cache = make_cache()
        compute(cache, prompt_seq((1, 200)))
        assert compute(cache, prompt_seq((1, 200))) == []
        assert compute(cache, prompt_seq((1, 192), (2, 64))) == [192]

    def test_in_the_chunk_that_passes_them(self) -> None:
        cache = make_cache(interval=128)
        seq = prompt_seq((1, 300))
        cache.adopt(seq, cache.match(seq))
        seq.block_table += cache.blocks.allocate(5)
        assert [p for p, _ in cache.prefill(seq, 0, 64)] == []
        assert [p for p, _ in cache.prefill(seq, 64, 128)] == [128]
        assert [p for p, _ in cache.prefill(seq, 128, 300)] == [256]

    def test_once_also_within_a_step(self) -> None:
        cache = make_cache()
        first, second = prompt_seq((1, 300)), prompt_seq((1, 300))
        for seq in (first, second):
            cache.adopt(seq, cache.match(seq))
            seq.block_table += cache.blocks.allocate(5)
        assert [p for p, _ in cache.prefill(first, 0, 300)] == [256]
        assert cache.prefill(second, 0, 300) == ()
        cache.end_step()
        assert cache.snapshots.num_used == 1

    def test_the_latest_ones_where_slots_are_few(self) -> None:
        cache = make_cache(num_snapshots=2, interval=64)
        assert compute(cache, prompt_seq((1, 300))) == [192, 256]


class TestMatch:
    def test_only_behind_the_step_that_writes(self) -> None:
        cache = make_cache()
        seq = prompt_seq((1, 300))
        cache.adopt(seq, cache.match(seq))
        seq.block_table += cache.blocks.allocate(5)
        cache.prefill(seq, 0, 300)
        assert found(cache, (1, 300)) == (0, 0)
        cache.end_step()
        assert found(cache, (1, 300)) == (256, 256)

    def test_worth_waiting_for_a_snapshot_that_this_step_writes(self) -> None:
        cache = make_cache()
        writer = prompt_seq((1, 300))
        cache.adopt(writer, cache.match(writer))
        writer.block_table += cache.blocks.allocate(5)
        cache.prefill(writer, 0, 300)  # a snapshot at 256

        def waits(*pieces: tuple[int, int], prompt_logprobs: int | None = None) -> bool:
            seq = prompt_seq(*pieces)
            seq.params = SamplingParams(prompt_logprobs=prompt_logprobs)
            return cache.is_being_written(seq, cache.match(seq))

        assert waits((1, 300))
        assert waits((1, 256), (2, 1))
        assert not waits((1, 256)), "a token is left to compute"
        assert not waits((1, 255), (2, 45))
        assert not waits((1, 300), prompt_logprobs=0)
        cache.end_step()
        assert not waits((1, 300))

    def test_a_token_is_left_to_compute(self) -> None:
        cache = make_cache(interval=64)
        compute(cache, prompt_seq((1, 256)))
        assert found(cache, (1, 256)) == (192, 256)
        assert found(cache, (1, 256), (2, 1)) == (256, 256)

    def test_blocks_without_a_snapshot_are_a_miss(self) -> None:
        cache = make_cache()
        compute(cache, prompt_seq((1, 300)))
        assert found(cache, (1, 200), (2, 100)) == (0, 192)

    def test_salt_and_content_tell_apart(self) -> None:
        cache = make_cache()
        compute(cache, prompt_seq((1, 300), salt="a"))
        assert found(cache, (1, 300)) == (0, 0)
        assert cache.match(prompt_seq((1, 300), salt="b")) == PrefixMatch()
        assert cache.match(prompt_seq((1, 300), salt="a")).num_tokens == 256
        assert len({*hash_blocks((1,) * 256, 64, "")}) == 4, "a block's place counts"
        assert hash_blocks((1,) * 63, 64, "") == ()

    def test_off_without_snapshots(self) -> None:
        cache = make_cache(num_snapshots=0)
        seq = prompt_seq((1, 300))
        assert compute(cache, seq) == []
        release(cache, seq)
        assert found(cache, (1, 300)) == (0, 0)
        assert cache.blocks.num_cached == 0


class TestEviction:
    def test_the_end_of_the_prefix_unused_for_longest_first(self) -> None:
        cache = make_cache(num_blocks=10, num_snapshots=20, interval=64)
        for kind in (1, 2):
            seq = prompt_seq((kind, 256))
            compute(cache, seq)
            release(cache, seq)
        cache.blocks.free(cache.blocks.allocate(2))  # the blank ones
        assert found(cache, (1, 257)) == (256, 256)
        cache.blocks.allocate(3)
        assert found(cache, (1, 257)) == (192, 192)
        assert found(cache, (2, 257)) == (256, 256)

    def test_a_hit_makes_a_prefix_young(self) -> None:
        cache = make_cache(num_blocks=8, num_snapshots=20, interval=64)
        for kind in (1, 2, 1):
            seq = prompt_seq((kind, 256))
            compute(cache, seq)
            release(cache, seq)
        cache.blocks.allocate(2)
        assert found(cache, (1, 257))[0] == 256
        assert found(cache, (2, 257))[0] < 256

    def test_snapshots_go_with_any_block_of_their_prefix(self) -> None:
        """The first block is the one unused for longest: a copy of it was in use all the time."""
        cache = make_cache(num_blocks=9, interval=64)
        first, second = prompt_seq((1, 80)), prompt_seq((1, 256))
        for seq in (first, second):  # side by side, so each computes its own first block
            cache.adopt(seq, cache.match(seq))
            seq.block_table += cache.blocks.allocate(-(-len(seq.prompt_ids) // 64))
            cache.prefill(seq, 0, len(seq.prompt_ids))
        cache.end_step()
        assert cache.snapshots.num_used == 4
        release(cache, first)
        cache.blocks.allocate(5)  # four blank ones and the first block
        assert cache.blocks.num_evictions == 1
        assert cache.snapshots.num_used == 0
        assert found(cache, (1, 257)) == (0, 0)
        check_snapshots(cache, FIRST_SLOT)

    def test_a_writer_registers_again_what_was_lost(self) -> None:
        cache = make_cache(num_blocks=9, interval=64)
        first, second = prompt_seq((1, 80)), prompt_seq((1, 256))
        for seq, end in ((first, 80), (second, 128)):
            cache.adopt(seq, cache.match(seq))
            seq.block_table += cache.blocks.allocate(-(-len(seq.prompt_ids) // 64))
            cache.prefill(seq, 0, end)
        cache.end_step()
        release(cache, first)
        cache.blocks.allocate(5)
        cache.prefill(second, 128, 256)
        cache.end_step()
        assert found(cache, (1, 257)) == (256, 256)
        check_snapshots(cache, FIRST_SLOT)


class TestSnapshotPool:
    def test_a_slot_has_one_part_in_a_step(self) -> None:
        pool = SnapshotPool(4, 2)
        for name in (b"a", b"b"):
            slot = pool.allocate()
            assert slot is not None
            pool.put(name, slot)
        pool.end_step()
        read = pool.use(b"a")
        written = pool.allocate()
        assert {read, written} == {4, 5}
        assert pool.allocate() is None
        assert b"a" in pool
        assert b"b" not in pool

    def test_the_one_unused_for_longest_is_overwritten(self) -> None:
        pool = SnapshotPool(0, 3)
        for name in (b"a", b"b", b"c"):
            slot = pool.allocate()
            assert slot is not None
            pool.put(name, slot)
        pool.use(b"a")
        pool.end_step()
        pool.allocate()
        assert [name in pool for name in (b"a", b"b", b"c")] == [True, False, True]
        assert pool.num_evictions == 1

    def test_a_dropped_slot_waits_for_the_next_step_if_this_one_reads_it(self) -> None:
        pool = SnapshotPool(0, 1)
        slot = pool.allocate()
        assert slot is not None
        pool.put(b"a", slot)
        pool.end_step()
        pool.use(b"a")
        pool.drop(b"a")
        assert pool.allocate() is None
        pool.end_step()
        assert pool.allocate() == slot


class TestBlocks:
    def test_blank_blocks_are_taken_before_cached_ones(self) -> None:
        evicted: list[bytes] = []
        blocks = BlockManager(4, evicted.append)
        held = blocks.allocate(3)
        blocks.register(b"x", held[0])
        blocks.free(held)
        assert blocks.allocate(3) == [3, held[1], held[2]]
        assert (evicted, blocks.find(b"x")) == ([], held[0])
        assert blocks.allocate(1) == [held[0]]
        assert (evicted, blocks.find(b"x")) == ([b"x"], None)

    def test_shared_blocks_are_free_when_the_last_holder_is_gone(self) -> None:
        blocks = BlockManager(2)
        (block,) = blocks.allocate(1)
        blocks.register(b"x", block)
        blocks.share([block])
        blocks.free([block])
        assert (blocks.is_used(block), blocks.num_free) == (True, 1)
        blocks.free([block])
        assert (blocks.is_used(block), blocks.num_free, blocks.num_cached) == (False, 2, 1)

    def test_a_used_copy_replaces_one_that_nobody_uses(self) -> None:
        blocks = BlockManager(3)
        old, new, other = blocks.allocate(3)
        blocks.register(b"x", old)
        blocks.register(b"x", new)
        assert blocks.find(b"x") == old
        blocks.free([old])
        blocks.register(b"x", new)
        assert (blocks.find(b"x"), blocks.num_cached, blocks.num_free) == (new, 0, 1)
        blocks.free([new, other])
        check_blocks(make_cache_of(blocks), Counter())

    def test_only_registered_blocks_are_shared(self) -> None:
        blocks = BlockManager(1)
        with pytest.raises(AssertionError, match="block 0 is not registered"):
            blocks.share([0])


def make_cache_of(blocks: BlockManager) -> PrefixCache:
    cache = make_cache()
    cache.blocks = blocks
    return cache


def test_random_prompts_leave_the_pools_whole() -> None:
    rng = random.Random(5)
    cache = make_cache(num_blocks=24, num_snapshots=5, interval=128)
    held: list[Sequence] = []
    num_hits = 0
    for _ in range(400):
        if held and (rng.random() < 0.4 or cache.blocks.num_free < 8):
            release(cache, held.pop(rng.randrange(len(held))))
        else:
            pieces = [(rng.randint(1, 3), rng.choice([64, 100, 192])) for _ in range(2)]
            seq = prompt_seq(*pieces)
            num_hits += cache.match(seq).num_tokens > 0
            compute(cache, seq, rng.choice([64, 128, 1024]))
            held.append(seq)
        check_blocks(cache, Counter(block for seq in held for block in seq.block_table))
        check_snapshots(cache, FIRST_SLOT)
    assert num_hits > 50
    assert cache.blocks.num_evictions > 50
    assert cache.snapshots.num_evictions > 10
