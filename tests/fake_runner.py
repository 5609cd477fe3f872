"""A scripted model on a pretend device, to drive the scheduler without any arithmetic.

The next token is a hash of all tokens before it, so an output equals that of the request alone
only if every token was fed, once, in order. The device's memory is fed by nothing but what
`ScheduledBatch` carries (of a sequence it reads the prompt and the identity), is never cleaned,
and is read the way the kernels read it: attention through the block table of the slot, the
recurrence through the slot's state. The two must tell the same story.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from deltaserve.engine.capacity import Capacity
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.scheduled_batch import ScheduledBatch, ScheduledPrefill
from deltaserve.engine.scheduler import Scheduler
from deltaserve.engine.sequence import FinishReason, RequestOutput, Sequence, TokenLogprobs

POISON = -7
NON_FINITE = -1

CAPACITY = Capacity(
    num_blocks=32,
    block_size=64,
    num_state_slots=4,
    max_model_len=1024,
    max_num_batched_tokens=512,
    prefill_chunk=128,
    max_queue=8,
)


@dataclass(frozen=True)
class ScriptedModel:
    """`non_finite_every`: about one in so many tokens comes from logits that are not finite."""

    vocab_size: int = 50
    non_finite_every: int = 0

    def next_id(self, tokens: list[int]) -> int:
        digest = hash(tuple(tokens)) & 0xFFFFFFFFFFFF
        if self.non_finite_every and digest % self.non_finite_every == 0:
            return NON_FINITE
        return (digest >> 8) % self.vocab_size

    def generate_alone(
        self, prompt_ids: tuple[int, ...], params: SamplingParams, stop_ids: frozenset[int]
    ) -> tuple[list[int], FinishReason]:
        """What a request gives when nothing else is in the world."""
        output_ids: list[int] = []
        if params.max_tokens == 0:
            return output_ids, FinishReason.LENGTH
        while True:
            token_id = self.next_id([*prompt_ids, *output_ids])
            if token_id == NON_FINITE:
                return output_ids, FinishReason.ERROR
            output_ids.append(token_id)
            if token_id in stop_ids and not params.ignore_eos:
                return output_ids, FinishReason.STOP
            if len(output_ids) == params.max_tokens:
                return output_ids, FinishReason.LENGTH


class FakeRunner:
    """Runs a batch as the device would and returns the ids of its sampled rows."""

    def __init__(self, capacity: Capacity, model: ScriptedModel) -> None:
        blocks_per_seq = capacity.blocks_for(capacity.max_model_len)
        slots = capacity.num_state_slots
        self.model = model
        self.block_size = capacity.block_size
        self.num_slots = slots
        self.kv = [[(POISON, POISON, "")] * capacity.block_size for _ in range(capacity.num_blocks)]
        self.block_tables = [[POISON] * blocks_per_seq for _ in range(slots)]
        # the tokens that made the state, and the pass that each was in
        self.states: list[list[tuple[int, str]]] = [
            [(POISON, "")] for _ in range(slots + capacity.num_snapshots)
        ]
        self.next_ids = [POISON] * slots
        self.params: list[SamplingParams | None] = [None] * slots

    def run(self, batch: ScheduledBatch) -> list[int]:
        rows = [*batch.decodes, *batch.prefills]
        slots = [row.state_slot for row in rows]
        assert len(set(slots)) == len(slots), "one row per slot"
        assert len({id(row.sequence) for row in rows}) == len(rows), "one row per sequence"
        for seq in batch.admitted:
            self.params[seq.state_slot] = seq.params
        for update in batch.block_updates:
            self.block_tables[update.state_slot][update.index] = update.block
        for row in rows:
            assert self.params[row.state_slot] is row.sequence.params

        self.check_snapshots(batch)
        sampled_ids: list[int] = []
        for decode in batch.decodes:
            assert decode.position >= len(decode.sequence.prompt_ids), "prompt in a decode row"
            slot = decode.state_slot
            fed = self.next_ids[slot] if decode.input_id == -1 else decode.input_id
            assert fed != POISON
            logits = self._feed(slot, decode.position, [fed], "decode")
            if decode.sample:
                sampled_ids.append(self._sample(slot, logits))
        for prefill in batch.prefills:
            slot = prefill.state_slot
            self._start_from(prefill)
            tokens = list(prefill.sequence.prompt_ids[prefill.start : prefill.end])
            assert tokens and prefill.end - prefill.start == len(tokens)
            logits = self._feed(slot, prefill.start, tokens, "prefill")
            for position, snapshot in prefill.snapshots:
                self.states[snapshot] = self.states[slot][:position]
            if prefill.sample:
                assert prefill.end == len(prefill.sequence.prompt_ids)
                sampled_ids.append(self._sample(slot, logits))
        return sampled_ids

    @staticmethod
    def prompt_logprobs(batch: ScheduledBatch) -> list[list[TokenLogprobs]]:
        """Entries that say which prompt token they are of: the logprob is minus its position."""
        for row in batch.prefills:
            wanted = row.logprob_positions
            assert not wanted or row.start <= wanted.start < wanted.stop <= row.end
        return [
            [TokenLogprobs(-float(p + 1), (), ()) for p in row.logprob_positions]
            for row in batch.prefills
            if row.logprob_positions
        ]

    def check_snapshots(self, batch: ScheduledBatch) -> None:
        """Nothing is read and written in one step; all of it lies beyond the sequences' slots."""
        read = {p.initial_slot for p in batch.prefills if p.initial_slot is not None}
        written = [slot for p in batch.prefills for _, slot in p.snapshots]
        assert len(set(written)) == len(written)
        assert not read.intersection(written)
        assert all(self.num_slots <= slot < len(self.states) for slot in (*read, *written))
        for p in batch.prefills:
            positions = [position for position, _ in p.snapshots]
            assert positions == sorted(positions)
            assert all(p.start < at <= p.end and at % 64 == 0 for at in positions)

    def _start_from(self, prefill: ScheduledPrefill) -> None:
        if prefill.initial_slot is not None:
            assert prefill.start > 0
            self.states[prefill.state_slot] = list(self.states[prefill.initial_slot])
        elif prefill.start == 0:
            self.states[prefill.state_slot] = []

    def _feed(self, slot: int, start: int, tokens: list[int], by: str) -> list[int]:
        """Writes tokens at positions start .. of a slot; returns the context attention sees."""
        state = self.states[slot]
        assert len(state) == start, "the recurrence takes every token once, in order"
        state += [(token, by) for token in tokens]
        table, size = self.block_tables[slot], self.block_size
        for position, token in enumerate(tokens, start):
            self.kv[table[position // size]][position % size] = (position, token, by)
        end = len(state)
        cached = [entry for block in table[: -(-end // size)] for entry in self.kv[block]][:end]
        expected = [(position, *entry) for position, entry in enumerate(state)]
        assert cached == expected, "keys and values are those of this sequence"
        passes = [entry[1] for entry in state]
        num_prompt = passes.count("prefill")
        assert passes == ["prefill"] * num_prompt + ["decode"] * (end - num_prompt)
        return [token for token, _ in state]

    def _sample(self, slot: int, context: list[int]) -> int:
        self.next_ids[slot] = self.model.next_id(context)
        return self.next_ids[slot]


@dataclass
class OverlappedLoop:
    """The engine's loop: `depth` steps are scheduled and run before the oldest one's ids are read
    (1 in the engine, 0 without overlap)."""

    scheduler: Scheduler
    runner: FakeRunner
    depth: int = 1
    outputs: dict[str, list[RequestOutput]] = field(default_factory=dict)
    in_flight: deque[tuple[ScheduledBatch, list[int], list[list[TokenLogprobs]]]] = field(
        default_factory=deque
    )

    def step(self) -> ScheduledBatch:
        batch = self.launch()
        if len(self.in_flight) > self.depth:
            self.read()
        return batch

    def launch(self) -> ScheduledBatch:
        batch = self.scheduler.schedule()
        self.in_flight.append((batch, self.runner.run(batch), self.runner.prompt_logprobs(batch)))
        return batch

    def read(self) -> None:
        """Reads the ids of the oldest step in flight."""
        batch, ids, prompt_logprobs = self.in_flight.popleft()
        for output in self.scheduler.update(batch, ids, None, prompt_logprobs):
            self.outputs.setdefault(output.request_id, []).append(output)

    def finish(self, max_steps: int = 10_000) -> int:
        """Steps until nothing is left to do; returns how many steps that took."""
        num_steps = 0
        while self.scheduler.has_work:
            assert num_steps < max_steps, f"work left after {max_steps} steps"
            self.step()
            num_steps += 1
        while self.in_flight:
            self.read()
        return num_steps

    def token_ids(self, seq: Sequence) -> list[int]:
        return [i for output in self.outputs.get(seq.request_id, []) for i in output.token_ids]


def make_seq(
    request_id: str, num_prompt: int, max_tokens: int = 4, stop_ids: tuple[int, ...] = ()
) -> Sequence:
    return Sequence(
        request_id,
        tuple(range(1, num_prompt + 1)),
        SamplingParams(max_tokens=max_tokens),
        frozenset(stop_ids),
    )


def make_loop(capacity: Capacity, *seqs: Sequence, depth: int = 1) -> OverlappedLoop:
    loop = OverlappedLoop(Scheduler(capacity), FakeRunner(capacity, ScriptedModel()), depth)
    for seq in seqs:
        loop.scheduler.add(seq)
    return loop


def prefill_ranges(batch: ScheduledBatch) -> list[tuple[str, int, int]]:
    return [(row.sequence.request_id, row.start, row.end) for row in batch.prefills]


def decode_ids(batch: ScheduledBatch) -> list[str]:
    return [row.sequence.request_id for row in batch.decodes]
