"""Capacity: what one engine can hold, decided once by the memory plan.

The scheduler, refusal messages and metrics all read these numbers; nothing else states them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Capacity:
    """Counts, not bytes. `num_state_slots` equals the largest number of running sequences.

    `max_num_batched_tokens`: prompt tokens of a step in which nothing decodes; `prefill_chunk`:
    of a step in which something does (more beside many decode rows: `prefill_chunks`).
    Both are multiples of 64. `max_queue`: requests that wait beyond those that free slots await.
    `num_snapshots`: states of cached prefixes, one every `snapshot_interval` tokens and at some
    places more; 0: no prefix caching.
    """

    num_blocks: int
    block_size: int
    num_state_slots: int
    max_model_len: int
    max_num_batched_tokens: int
    prefill_chunk: int
    max_queue: int
    num_snapshots: int = 0
    snapshot_interval: int = 1024

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that `num_tokens` cached tokens take."""
        return -(-num_tokens // self.block_size)
