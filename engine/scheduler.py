"""Scheduler: which tokens of which sequences the next step runs, and in which blocks and slots.

Owns the sequences from `add` to their end, the free blocks and slots, and their order. Numbers
only: no arrays, no clock, no text (stop strings are the output processor's, which aborts).

Life of a sequence, oldest on the left: the one admitted first. Every sequence in `running` comes
before every one in `waiting`: admission takes the head of waiting to the end of running, preemption
takes the end of running back to the head of waiting.

    running  [oldest ... youngest]  <--admit--  waiting  [head ... ]  <--add--
                                    --preempt->
    last token issued: leaves running at the next `schedule`, ends when `update` reads its id

Steps overlap: `schedule` of step n+1 comes before `update` of step n. So a token counts as soon as
it is issued (`num_sampled`), an id not read yet is fed as -1, and a sequence may end in `update`
while the next step holds it. Blocks and slots are free at once even so: whoever gets them next
uses them in a later step, which the device runs after all steps already scheduled.

Blocks. The oldest come first: a sequence that lacks a block preempts the youngest until it has
one; the youngest itself waits in place, for it would only get its own blocks back by replay.

Progress. The oldest running sequence gets a row in every step until its last token is issued. Its
decode row needs at most one block, its next chunk (at most 64 tokens, and it is the first to draw
on a budget of at least 64) a few; each is found by preempting all others if need be, since `add`
refuses what does not fit alone. When nothing runs, the head is admitted: nothing is reserved or
owed, and all blocks and slots are free. It has to wait only for the ids it has been issued, and
`update` brings those. Hence the oldest sequence ends, then the next one, and so on; nothing
starves but what `priority` keeps behind all that still comes. A preempted sequence keeps its output
ids and is replayed, so no token is lost.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from .capacity import Capacity
from .prefill_chunks import CHUNK_ALIGNMENT, chunk_end, issue_prompt_logprobs, prefill_budget
from .prefix_cache import PrefixCache
from .request_queue import QueueFullError, RequestQueue, RequestTooLargeError
from .scheduled_batch import BlockUpdate, ScheduledBatch, ScheduledDecode, ScheduledPrefill
from .sequence import RequestOutput, Sequence, SequenceStatus, TokenLogprobs
from .state_manager import StateManager
from .step_outputs import step_outputs

__all__ = ["QueueFullError", "RequestTooLargeError", "Scheduler", "SchedulerStats"]


@dataclass(frozen=True)
class SchedulerStats:
    num_waiting: int
    num_running: int
    num_blocks_used: int
    num_slots_used: int
    num_preemptions: int


@dataclass
class _Step:
    """The batch being made."""

    decodes: list[ScheduledDecode] = field(default_factory=list)
    prefills: list[ScheduledPrefill] = field(default_factory=list)
    block_updates: list[BlockUpdate] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    has_preempted: bool = False


class Scheduler:
    """`max_num_seqs` lowers the number of running sequences below `capacity.num_state_slots`."""

    def __init__(self, capacity: Capacity, max_num_seqs: int | None = None) -> None:
        if max_num_seqs is not None and max_num_seqs < 1:
            raise ValueError(f"max_num_seqs: must be at least 1, got {max_num_seqs}")
        assert CHUNK_ALIGNMENT <= capacity.prefill_chunk <= capacity.max_num_batched_tokens
        self.capacity = capacity
        self.prefix_cache = PrefixCache(capacity)
        self._blocks = self.prefix_cache.blocks
        self._slots = StateManager(
            min(max_num_seqs or capacity.num_state_slots, capacity.num_state_slots)
        )
        self._live: dict[str, Sequence] = {}
        self._waiting = RequestQueue(capacity)
        self._running: list[Sequence] = []
        self._issued_last: list[Sequence] = []
        self._num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether a sequence has not ended, be it only that its last id is unread."""
        return bool(self._live)

    @property
    def sequences(self) -> list[Sequence]:
        """Those that have not ended, in order of arrival."""
        return list(self._live.values())

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Sequences that hold a state slot."""
        return len(self._running)

    @property
    def stats(self) -> SchedulerStats:
        return SchedulerStats(
            num_waiting=len(self._waiting),
            num_running=len(self._running),
            num_blocks_used=self._blocks.num_used,
            num_slots_used=self._slots.num_used,
            num_preemptions=self._num_preemptions,
        )

    def add(self, seq: Sequence) -> None:
        """Queues a new sequence.

        Raises RequestTooLargeError (400) if it could never run, QueueFullError (429), ValueError
        for an empty prompt or a request_id in use.
        """
        if seq.request_id in self._live:
            raise ValueError(f"request_id {seq.request_id!r} is in use")
        self._waiting.add(seq, self._slots.num_free)
        self._live[seq.request_id] = seq

    def abort(self, request_id: str) -> bool:
        """Ends a sequence in any state and frees all it holds; no output follows.

        False if there is none by that id, or it has ended already.
        """
        seq = self._live.get(request_id)
        if seq is None:
            return False
        self._finish(seq)
        return True

    def schedule(self) -> ScheduledBatch:
        """The next step. Read its slots and `admitted` before the next call of any method.

        Empty while `has_work` only if all that is left waits for ids of steps not yet passed to
        `update`.
        """
        for seq in self._issued_last:
            if seq.status is SequenceStatus.RUNNING:
                self._running.remove(seq)
                self._release(seq)
        self._issued_last.clear()

        step = _Step()
        num_prompts = sum(seq.in_prefill for seq in self._running)
        num_decodes = len(self._running) - num_prompts
        num_prompts += self._num_admissible()
        budget = prefill_budget(self.capacity, num_decodes, num_prompts)
        # Preemption pops from the end of this list: never a sequence that has its row already.
        for seq in self._running:
            if seq.num_computed_tokens < len(seq.prompt_ids):
                budget -= self._schedule_prefill(seq, budget, step)
            else:
                self._schedule_decode(seq, step)
        if not step.has_preempted:
            self._admit(budget, step)
        self.prefix_cache.end_step()
        return ScheduledBatch(
            tuple(step.decodes),
            tuple(step.prefills),
            tuple(step.block_updates),
            tuple(step.admitted),
        )

    def update(
        self,
        batch: ScheduledBatch,
        sampled_ids: SequenceOf[int],
        logprobs: SequenceOf[TokenLogprobs | None] | None = None,
        prompt_logprobs: SequenceOf[SequenceOf[TokenLogprobs] | None] = (),
    ) -> list[RequestOutput]:
        """Takes the ids of `batch.sampled`, in order; batches in the order they were scheduled.
        `prompt_logprobs`: of each prefill with `logprob_positions`, in order.

        An id of -1, or None for a prefill's log-probabilities, stands for logits that were not
        finite: that sequence ends with ERROR. What concerns sequences that ended meanwhile is
        dropped.
        """
        outputs = []
        for seq, output in step_outputs(batch, sampled_ids, logprobs, prompt_logprobs):
            outputs.append(output)
            if output.finish_reason is not None:
                self._finish(seq)
        return outputs

    def _schedule_decode(self, seq: Sequence, step: _Step) -> None:
        position = seq.num_computed_tokens
        if position == len(seq.block_table) * self.capacity.block_size:
            while self._blocks.num_free == 0:
                if not self._preempt_youngest(seq, step):
                    return
            self._extend_block_table(seq, 1, step)
        index = position - len(seq.prompt_ids)
        assert index < seq.num_sampled < seq.params.max_tokens
        input_id = seq.output_ids[index] if index < len(seq.output_ids) else -1
        sample = index + 1 == seq.num_sampled
        step.decodes.append(ScheduledDecode(seq, seq.state_slot, position, input_id, sample))
        seq.num_computed_tokens = position + 1
        if sample:
            self._count_issued(seq)

    def _schedule_prefill(
        self, seq: Sequence, budget: int, step: _Step, initial_slot: int | None = None
    ) -> int:
        """Adds the next chunk of a prompt and returns its tokens; 0 if the budget or the blocks
        do not reach its next boundary. A chunk is cut short before anyone is preempted for it."""
        start, num_prompt = seq.num_computed_tokens, len(seq.prompt_ids)
        limit = chunk_end(start, num_prompt, start + budget)
        if limit == start:
            return 0
        while (end := chunk_end(start, num_prompt, min(limit, self._room(seq)))) == start:
            if not self._preempt_youngest(seq, step):
                return 0
        self._extend_block_table(seq, self.capacity.blocks_for(end) - len(seq.block_table), step)
        ends_prompt = end == num_prompt and seq.num_sampled == 0
        sample = ends_prompt and seq.params.max_tokens > 0
        snapshots = self.prefix_cache.prefill(seq, start, end)
        positions = issue_prompt_logprobs(seq, end)
        step.prefills.append(
            ScheduledPrefill(
                seq, seq.state_slot, start, end, sample, initial_slot, snapshots, positions
            )
        )
        seq.num_computed_tokens = end
        if sample:
            self._count_issued(seq)
        elif ends_prompt:
            self._issued_last.append(seq)
        return end - start

    def _admit(self, budget: int, step: _Step) -> None:
        """Moves sequences from the head of waiting to running while slots, blocks and budget last.

        The head must find free blocks for all tokens it will be fed as things stand (its prompt,
        and in replay its outputs), beside what running sequences still lack for theirs and one
        block more for each of them. So an admission does not make a running sequence preempt
        before each has filled another block. Cached blocks that others use are not free, so the
        head shares them at no cost; cached ones that are free count as any others. Nobody overtakes
        the head: a large request would starve behind small ones. It waits for its prefix as long as
        an older sequence computes more of it in each step.
        """
        if not self._waiting or not self._slots.num_free or budget == 0:
            return
        owed = sum(self._num_blocks_owed(seq) for seq in self._running)
        while self._waiting and self._slots.num_free:
            seq = self._waiting.head
            if len(seq.output_ids) < seq.num_sampled:
                return
            match = self.prefix_cache.match(seq)
            reserved = owed + len(self._running)
            needed = self._num_blocks_owed(seq) - sum(map(self._blocks.is_used, match.blocks))
            start = match.num_tokens
            if (
                self._blocks.num_free < reserved + needed
                or self.prefix_cache.is_being_written(seq, match)
                or chunk_end(start, len(seq.prompt_ids), start + budget) == start
            ):
                return
            self._waiting.pop_head()
            seq.status = SequenceStatus.RUNNING
            seq.state_slot = self._slots.allocate()
            self._running.append(seq)
            step.admitted.append(seq)
            initial_slot = self.prefix_cache.adopt(seq, match)
            for index, block in enumerate(seq.block_table):
                step.block_updates.append(BlockUpdate(seq.state_slot, index, block))
            budget -= self._schedule_prefill(seq, budget, step, initial_slot)
            owed += self._num_blocks_owed(seq)

    def _num_admissible(self) -> int:
        """At most so many of the waiting could run now: there is a slot and a block for each."""
        count = min(len(self._waiting), self._slots.num_free)
        if count == 0:
            return 0
        owed = sum(self._num_blocks_owed(seq) for seq in self._running)
        return max(0, min(count, self._blocks.num_free - owed))

    def _num_blocks_owed(self, seq: Sequence) -> int:
        """Blocks that the known tokens of `seq` will take and that it does not hold yet."""
        return max(0, self.capacity.blocks_for(seq.num_tokens) - len(seq.block_table))

    def _room(self, seq: Sequence) -> int:
        """Tokens of `seq` for which there are blocks, its own and the free ones."""
        return (len(seq.block_table) + self._blocks.num_free) * self.capacity.block_size

    def _extend_block_table(self, seq: Sequence, count: int, step: _Step) -> None:
        for block in self._blocks.allocate(count):
            step.block_updates.append(BlockUpdate(seq.state_slot, len(seq.block_table), block))
            seq.block_table.append(block)

    def _count_issued(self, seq: Sequence) -> None:
        seq.num_sampled += 1
        if seq.num_sampled == seq.params.max_tokens:
            self._issued_last.append(seq)

    def _preempt_youngest(self, needer: Sequence, step: _Step) -> bool:
        """Sends the youngest running sequence back to wait for its replay; False if that would be
        `needer` itself."""
        seq = self._running[-1]
        if seq is needer:
            return False
        self._running.pop()
        self._release(seq)
        seq.status = SequenceStatus.WAITING
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        self._waiting.push_front(seq)
        self._num_preemptions += 1
        step.has_preempted = True
        return True

    def _release(self, seq: Sequence) -> None:
        self._blocks.free(reversed(seq.block_table))  # of a prefix the end is taken first
        seq.block_table.clear()
        self._slots.free(seq.state_slot)
        seq.state_slot = -1

    def _finish(self, seq: Sequence) -> None:
        if seq.status is SequenceStatus.WAITING:
            self._waiting.remove(seq)
        elif seq.state_slot >= 0:
            self._running.remove(seq)
            self._release(seq)
        seq.status = SequenceStatus.FINISHED
        del self._live[seq.request_id]
