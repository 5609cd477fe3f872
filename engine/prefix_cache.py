"""PrefixCache: which part of a prompt has been computed before, and what is kept for later ones.

A prompt can start behind a prefix if the KV blocks of all of it and a snapshot of the recurrent and
conv state at its very end are there: all or nothing. Both were written by prefill, and the prefix
ends on the grid that prefill computes on, so what follows has the same bits as without the cache.

    prompt     |-------|-------|-------|-------|-------|----|
    KV blocks    found   found   found   not found
    snapshots          x
                       ^ it starts here
                                       ^ it leaves cached KV here, and a snapshot is taken

Snapshots are taken where a prompt leaves cached KV (the third prompt of a kind starts there), at
multiples of `interval`, and near its end. Before the last TAIL tokens: a chat's next turn repeats
the prompt, but its template may render the last few tokens otherwise. Before the last QUESTION
tokens: where prompts share a long beginning, they mostly differ in something short behind it.

Written blocks and snapshots are found from the next step on, which the device runs after the one
that writes them; so a writer may be aborted or preempted at once. A snapshot is kept only as long
as the blocks of its whole prefix are.
"""

from __future__ import annotations

import hashlib
from array import array
from dataclasses import dataclass
from math import lcm

from .block_manager import BlockManager
from .capacity import Capacity
from .prefill_chunks import CHUNK_ALIGNMENT
from .sequence import Sequence
from .snapshot_pool import SnapshotPool

TAIL = 16
QUESTION = 256


@dataclass(frozen=True)
class PrefixMatch:
    """What is cached of a prompt: it can start at `num_tokens`, whose KV is in `blocks`. KV alone
    is there up to `num_kv_tokens`."""

    num_tokens: int = 0
    blocks: tuple[int, ...] = ()
    num_kv_tokens: int = 0


@dataclass
class PrefixCacheStats:
    """Tokens of prompts that were looked up, and of them those found; each prompt once."""

    num_query_tokens: int = 0
    num_hit_tokens: int = 0


class PrefixCache:
    """Shares the blocks of `self.blocks` between sequences; off where there are no snapshots."""

    def __init__(self, capacity: Capacity) -> None:
        self.blocks = BlockManager(capacity.num_blocks, self._on_evict)
        self.snapshots = SnapshotPool(capacity.num_state_slots, capacity.num_snapshots)
        self.stats = PrefixCacheStats()
        self._block_size = capacity.block_size
        self._unit = lcm(CHUNK_ALIGNMENT, capacity.block_size)  # a prefix ends at a multiple of it
        self._interval = -(-capacity.snapshot_interval // self._unit) * self._unit
        self._children: dict[bytes, set[bytes]] = {}  # of any prefix, the registered ones
        self._parents: dict[bytes, bytes] = {}  # of registered ones
        self._prefilled: list[tuple[Sequence, int]] = []  # in the step being made
        self._written: dict[bytes, int] = {}  # snapshots of that step

    @property
    def is_on(self) -> bool:
        return self.snapshots.num_slots > 0

    def match(self, seq: Sequence) -> PrefixMatch:
        """At least one token of the prompt is left to compute. Changes nothing."""
        if not self.is_on or seq.params.prompt_logprobs is not None:
            return PrefixMatch()
        hashes = self._hashes(seq)
        blocks: list[int] = []
        for block_hash in hashes:
            block = self.blocks.find(block_hash)
            if block is None:
                break
            blocks.append(block)
        num_kv = len(blocks) * self._block_size
        end = min(num_kv, len(seq.prompt_ids) - 1)
        for position in range(end - end % self._unit, 0, -self._unit):
            if self._hash_at(seq, position) in self.snapshots:
                return PrefixMatch(position, tuple(blocks[: position // self._block_size]), num_kv)
        return PrefixMatch(num_kv_tokens=num_kv)

    def is_being_written(self, seq: Sequence, match: PrefixMatch) -> bool:
        """Whether the step being made writes more of the prompt than was matched, so that it is
        worth waiting for the next one: of equal prompts that arrive together one is computed."""
        if not self._written or seq.params.prompt_logprobs is not None:
            return False
        first, last = match.num_tokens // self._block_size, len(seq.prompt_ids) - 1
        hashes = self._hashes(seq)[first : last // self._block_size]
        return not self._written.keys().isdisjoint(hashes)

    def adopt(self, seq: Sequence, match: PrefixMatch) -> int | None:
        """An admitted sequence takes what was matched in this step. Returns the snapshot slot that
        it starts from, None if it starts from nothing."""
        if not self.is_on:
            return None
        num_prompt, start = len(seq.prompt_ids), match.num_tokens
        if seq.num_preemptions == 0 and seq.params.prompt_logprobs is None:
            self.stats.num_query_tokens += num_prompt
            self.stats.num_hit_tokens += start
            seq.num_cached_tokens = start
        self.blocks.share(match.blocks)
        seq.block_table.extend(match.blocks)
        seq.num_computed_tokens = start
        wanted = {*range(self._interval, num_prompt + 1, self._interval)}
        wanted.add((num_prompt - TAIL) // self._unit * self._unit)
        wanted.add((num_prompt - QUESTION) // self._unit * self._unit)
        if match.num_kv_tokens < num_prompt // self._block_size * self._block_size:
            wanted.add(match.num_kv_tokens // self._unit * self._unit)
        seq.snapshot_positions = sorted(position for position in wanted if position > start)
        return self.snapshots.use(self._hash_at(seq, start)) if start > 0 else None

    def prefill(self, seq: Sequence, start: int, end: int) -> tuple[tuple[int, int], ...]:
        """The step being made computes prompt tokens start .. end. Returns the snapshots that it
        shall write: (position, slot), in order. With few slots the later positions are served."""
        if not self.is_on:
            return ()
        self._prefilled.append((seq, end))
        snapshots = []
        for position in reversed(seq.snapshot_positions):
            if start < position <= end:
                prefix_hash = self._hash_at(seq, position)
                if prefix_hash in self.snapshots or prefix_hash in self._written:
                    continue
                slot = self.snapshots.allocate()
                if slot is None:
                    break
                self._written[prefix_hash] = slot
                snapshots.append((position, slot))
        return tuple(reversed(snapshots))

    def end_step(self) -> None:
        """The step is made: what it writes can be found from now on."""
        for seq, end in self._prefilled:
            hashes = self._hashes(seq)
            # All from the first on: what was registered for them before may have gone since.
            for i in range(end // self._block_size):
                self.blocks.register(hashes[i], seq.block_table[i])
                if i > 0:
                    self._parents[hashes[i]] = hashes[i - 1]
                    self._children.setdefault(hashes[i - 1], set()).add(hashes[i])
        for prefix_hash, slot in self._written.items():
            self.snapshots.put(prefix_hash, slot)
        self._prefilled.clear()
        self._written.clear()
        self.snapshots.end_step()

    def _hashes(self, seq: Sequence) -> tuple[bytes, ...]:
        if seq.block_hashes is None:
            seq.block_hashes = hash_blocks(
                seq.prompt_ids, self._block_size, seq.params.cache_salt or ""
            )
        return seq.block_hashes

    def _hash_at(self, seq: Sequence, position: int) -> bytes:
        """Of the prefix of that many tokens."""
        return self._hashes(seq)[position // self._block_size - 1]

    def _on_evict(self, block_hash: bytes) -> None:
        """Drops the snapshots of all prefixes that the block is part of."""
        parent = self._parents.pop(block_hash, None)
        if parent is not None:
            siblings = self._children[parent]
            siblings.discard(block_hash)
            if not siblings:
                del self._children[parent]
        pending = [block_hash]
        while pending:
            prefix_hash = pending.pop()
            self.snapshots.drop(prefix_hash)
            pending.extend(self._children.get(prefix_hash, ()))


def hash_blocks(ids: tuple[int, ...], block_size: int, salt: str) -> tuple[bytes, ...]:
    """Of each full block of the prompt, a hash of the salt and of all tokens up to its end."""
    data = memoryview(array("i", ids).tobytes())
    size = len(data) // len(ids) * block_size
    prefix = hashlib.sha256(hashlib.sha256(salt.encode()).digest())
    hashes = []
    for end in range(size, len(data) + 1, size):
        prefix.update(data[end - size : end])
        hashes.append(prefix.digest())
    return tuple(hashes)
