"""Random traffic through the scheduler: every request gives exactly what it gives alone.

The fake runner checks the device's side of each step (see its docstring); this file checks the
scheduler's rules after each step, and outputs and leaks at the end.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from deltaserve.engine.capacity import Capacity
from deltaserve.engine.prefill_chunks import prefill_budget
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.scheduled_batch import ScheduledBatch
from deltaserve.engine.scheduler import Scheduler, SchedulerStats
from deltaserve.engine.sequence import FinishReason, RequestOutput, Sequence, SequenceStatus

from .fake_runner import FakeRunner, OverlappedLoop, ScriptedModel
from .prefix_cache_checks import check_pools

STOP_IDS = frozenset({0})
MAX_MODEL_LEN = 512


Request = tuple[tuple[int, ...], SamplingParams]


@dataclass(frozen=True)
class Traffic:
    """`events()`, in order: a request arrives, a number says whom to abort, or None: a step."""

    capacity: Capacity
    max_num_seqs: int | None
    depth: int
    model: ScriptedModel
    num_requests: int
    steps_per_request: int
    abort_rate: float
    seed: int
    share_rate: float = 0.0
    """How many prompts begin as others do."""

    def events(self) -> Iterator[Request | float | None]:
        rng = random.Random(self.seed)
        for left in reversed(range(self.num_requests)):
            yield self._request(rng)
            for _ in range(rng.randint(0, 2 * self.steps_per_request) if left else 150):
                yield None
                if rng.random() < self.abort_rate:
                    yield rng.random()

    def _request(self, rng: random.Random) -> Request:
        """One that fits alone; mostly a short prompt with a long output, which is what preempts."""
        most = min(MAX_MODEL_LEN, self.capacity.num_blocks * self.capacity.block_size)
        long_prompt = rng.choice([63, 64, 65, 128, rng.randint(66, 260)])
        num_prompt = rng.choice([*(rng.randint(1, 40) for _ in range(3)), long_prompt])
        first = rng.randrange(1000)
        prompt = tuple(range(first, first + num_prompt))
        salt = None
        if rng.random() < self.share_rate:
            shared = tuple(range(2000, 2000 + rng.choice([64, 64, 128, 130, 192])))
            prompt, salt = (*shared, *prompt[:40]), rng.choice([None, None, None, "salt"])
        prompt = prompt[: most - 1]
        longest = most - len(prompt)
        max_tokens = min(rng.choice([1, rng.randint(2, 40), 100, 150, 150]), longest)
        params = SamplingParams(
            max_tokens=max_tokens, ignore_eos=rng.random() < 0.7, cache_salt=salt
        )
        if rng.random() < 0.3:
            max_tokens = rng.choice([0, max_tokens])
            params = dataclasses.replace(params, max_tokens=max_tokens, prompt_logprobs=0)
        return prompt, params


@st.composite
def traffic(draw: st.DrawFn) -> Traffic:
    block_size = draw(st.sampled_from([16, 32, 64, 128, 16]))
    prefill_chunk = draw(st.sampled_from([64, 128, 192]))
    capacity = Capacity(
        num_blocks=draw(st.integers(128 // block_size, 384 // block_size)),
        block_size=block_size,
        num_state_slots=draw(st.sampled_from([3, 4, 6, 1, 2])),
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=prefill_chunk + draw(st.sampled_from([0, 64, 320])),
        prefill_chunk=prefill_chunk,
        max_queue=100,
        num_snapshots=draw(st.sampled_from([3, 0, 1, 8])),
        snapshot_interval=draw(st.sampled_from([64, 128, 1024])),
    )
    return Traffic(
        capacity=capacity,
        max_num_seqs=draw(st.sampled_from([None, 2, 5])),
        depth=draw(st.sampled_from([1, 0, 2])),
        model=ScriptedModel(
            vocab_size=draw(st.sampled_from([1000, 60])),
            non_finite_every=draw(st.sampled_from([0, 0, 100])),
        ),
        num_requests=draw(st.sampled_from([1, 3, 6, 12])),
        steps_per_request=draw(st.sampled_from([0, 2, 8])),
        abort_rate=draw(st.sampled_from([0.0, 0.02, 0.2])),
        seed=draw(st.integers(0, 2**32 - 1)),
        share_rate=draw(st.sampled_from([0.8, 0.3])),
    )


def describe(seq: Sequence) -> str:
    """The state of a sequence, finer than its status."""
    if seq.status is SequenceStatus.RUNNING:
        if seq.num_sampled == seq.params.max_tokens and not seq.in_prefill:
            return "last token issued"
        if seq.num_computed_tokens < seq.num_prompt_tokens:
            return "prefill"
        replays = seq.num_computed_tokens < seq.num_prompt_tokens + seq.num_sampled - 1
        return "replay" if replays else "decode"
    if seq.status is SequenceStatus.WAITING and seq.num_preemptions > 0:
        unread = len(seq.output_ids) < seq.num_sampled
        return "preempted, an id unread" if unread else "preempted"
    return seq.status.value


class CheckedLoop(OverlappedLoop):
    """Checks the scheduler's promises around each step."""

    def __init__(self, traffic: Traffic) -> None:
        self.capacity = traffic.capacity
        super().__init__(
            Scheduler(traffic.capacity, traffic.max_num_seqs),
            FakeRunner(traffic.capacity, traffic.model),
            traffic.depth,
        )
        self.sequences: list[Sequence] = []  # in order of arrival
        self.aborted: set[str] = set()
        self.aborted_when: set[str] = set()

    def add(self, prompt_ids: tuple[int, ...], params: SamplingParams) -> None:
        seq = Sequence(str(len(self.sequences)), prompt_ids, params, STOP_IDS)
        self.scheduler.add(seq)
        self.sequences.append(seq)

    def abort(self, choice: float) -> None:
        """Aborts the youngest in one of the states there are, the rare ones as likely as others."""
        states = sorted({describe(seq) for seq in self.sequences})
        state = states[int(choice * len(states))]
        seq = next(seq for seq in reversed(self.sequences) if describe(seq) == state)
        was_live = seq.status is not SequenceStatus.FINISHED
        self.aborted_when.add(state)
        assert self.scheduler.abort(seq.request_id) is was_live
        if was_live:
            self.aborted.add(seq.request_id)
        self.check_holdings()

    def launch(self) -> ScheduledBatch:
        live = [seq for seq in self.sequences if seq.status is not SequenceStatus.FINISHED]
        to_feed = [s for s in live if s.in_prefill or s.num_sampled < s.params.max_tokens]
        preemptions = self.scheduler.stats.num_preemptions
        computed = {seq.request_id: seq.num_computed_tokens for seq in live}
        decoding = [s for s in to_feed if s.state_slot >= 0 and not s.in_prefill]
        batch = super().launch()
        computed |= {
            seq.request_id: seq.num_computed_tokens
            - sum(row.end - row.start for row in batch.prefills if row.sequence is seq)
            for seq in batch.admitted
        }
        self.check_rows(batch, computed, len(decoding), len(to_feed) - len(decoding))
        rows = {row.sequence.request_id for row in (*batch.decodes, *batch.prefills)}
        if to_feed:
            oldest = to_feed[0]
            unread = computed[oldest.request_id] == 0 and oldest.num_sampled > 0
            assert oldest.request_id in rows or unread, "the oldest always advances"
        for seq in decoding:
            if seq.request_id not in rows and seq.status is SequenceStatus.RUNNING:
                assert not batch.admitted
                assert self.scheduler.stats.num_blocks_used == self.capacity.num_blocks
                younger = self.sequences[self.sequences.index(seq) + 1 :]
                assert all(other.state_slot < 0 for other in younger), "only the youngest waits"
        if self.scheduler.stats.num_preemptions > preemptions:
            assert not batch.admitted
        self.check_admitted(batch)
        self.check_holdings()
        return batch

    def read(self) -> None:
        super().read()
        self.check_holdings()

    def check_rows(
        self, batch: ScheduledBatch, computed: dict[str, int], num_decodes: int, num_prompts: int
    ) -> None:
        assert all(row.position == computed[row.sequence.request_id] for row in batch.decodes)
        limit = prefill_budget(self.capacity, num_decodes, num_prompts)
        assert sum(row.end - row.start for row in batch.prefills) <= limit
        for row in batch.prefills:
            assert row.start == computed[row.sequence.request_id] < row.end
            assert row.end % 64 == 0 or row.end == row.sequence.num_prompt_tokens
        numbers = [int(row.sequence.request_id) for row in batch.prefills]
        assert numbers == sorted(numbers), "prompts in order of arrival"
        for row in (*batch.decodes, *batch.prefills):
            assert row.sequence.num_sampled <= row.sequence.params.max_tokens

    def check_admitted(self, batch: ScheduledBatch) -> None:
        """Nobody overtakes: whoever waits arrived after whoever runs."""
        running = [n for n, seq in enumerate(self.sequences) if seq.state_slot >= 0]
        waiting = [
            n for n, seq in enumerate(self.sequences) if seq.status is SequenceStatus.WAITING
        ]
        assert not running or not waiting or max(running) < min(waiting)
        assert {s.request_id for s in batch.admitted} <= {
            row.sequence.request_id for row in batch.prefills
        }, "an admitted sequence starts at once"

    def check_holdings(self) -> None:
        """Live sequences hold what the managers count as used, and nobody holds it twice."""
        stats = self.scheduler.stats
        blocks = [block for seq in self.sequences for block in seq.block_table]
        slots = [seq.state_slot for seq in self.sequences if seq.state_slot >= 0]
        assert len(set(blocks)) == stats.num_blocks_used
        if self.capacity.num_snapshots == 0:
            assert len(set(blocks)) == len(blocks), "nobody shares"
        check_pools(self.scheduler)
        assert len(set(slots)) == len(slots) == stats.num_slots_used == stats.num_running
        assert stats.num_waiting == sum(
            seq.status is SequenceStatus.WAITING for seq in self.sequences
        )
        for seq in self.sequences:
            if seq.state_slot < 0:
                assert not seq.block_table
            else:
                assert seq.status is SequenceStatus.RUNNING
                needed = self.capacity.blocks_for(seq.num_computed_tokens)
                assert len(seq.block_table) == needed, "blocks come as tokens are computed"

    def max_steps_left(self) -> int:
        """Bound of the progress proof: one sequence after the other, each replayed once."""
        return self.depth + sum(
            -(-seq.num_prompt_tokens // 64) + seq.params.max_tokens + self.depth + 1
            for seq in self.sequences
            if seq.status is not SequenceStatus.FINISHED
        )


def play(traffic: Traffic) -> CheckedLoop:
    loop = CheckedLoop(traffic)
    for entry in traffic.events():
        if entry is None:
            loop.step()
        elif isinstance(entry, float):
            loop.abort(entry)
        else:
            loop.add(*entry)
    loop.finish(loop.max_steps_left())
    return loop


def check_outputs(loop: CheckedLoop, model: ScriptedModel) -> None:
    """All is free again and each request gave what it gives alone."""
    assert loop.scheduler.stats == SchedulerStats(0, 0, 0, 0, loop.scheduler.stats.num_preemptions)
    for seq in loop.sequences:
        expected, reason = model.generate_alone(seq.prompt_ids, seq.params, STOP_IDS)
        outputs = loop.outputs.get(seq.request_id, [])
        check_prompt_logprobs(seq, outputs)
        token_ids = loop.token_ids(seq)
        assert all(output.finish_reason is None for output in outputs[:-1])
        if seq.request_id in loop.aborted:
            assert token_ids == expected[: len(token_ids)]
            assert not outputs or outputs[-1].finish_reason is None
            continue
        assert token_ids == expected
        assert outputs[-1].finish_reason is reason
        assert outputs[-1].stop_id == (token_ids[-1] if reason is FinishReason.STOP else None)
        assert (outputs[-1].error is not None) == (reason is FinishReason.ERROR)


def check_prompt_logprobs(seq: Sequence, outputs: list[RequestOutput]) -> None:
    """Each prompt token but the first once, in order, all with the first output."""
    wanted = 0 if seq.params.prompt_logprobs is None else seq.num_prompt_tokens - 1
    entries = [entry for output in outputs for entry in output.prompt_logprobs]
    if outputs and outputs[0].finish_reason is not FinishReason.ERROR:
        assert outputs[0].prompt_logprobs == tuple(entries)
        assert [-entry.logprob for entry in entries] == list(range(1, wanted + 1))
    else:
        assert entries == []


@given(traffic())
@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_outputs_equal_those_of_each_request_alone(traffic: Traffic) -> None:
    loop = play(traffic)
    event(f"preemptions: {min(loop.scheduler.stats.num_preemptions, 3)}")
    event(f"hits: {loop.scheduler.prefix_cache.stats.num_hit_tokens > 0}")
    check_outputs(loop, traffic.model)


@pytest.mark.parametrize("num_snapshots", [0, 2, 12])
def test_crowded_pool_with_many_preemptions_and_aborts(num_snapshots: int) -> None:
    """The same with few blocks for many slots, so that what is rare above surely happens."""
    capacity = Capacity(
        num_blocks=14,
        block_size=16,
        num_state_slots=6,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=256,
        prefill_chunk=64,
        max_queue=100,
        num_snapshots=num_snapshots,
        snapshot_interval=64,
    )
    model = ScriptedModel(vocab_size=200, non_finite_every=400)
    num_preemptions, aborted_when = 0, set[str]()
    num_hits = num_block_evictions = num_snapshot_evictions = 0
    for seed in range(12):
        loop = play(Traffic(capacity, None, 1 + seed % 2, model, 20, 5, 0.05, seed, 0.5))
        check_outputs(loop, model)
        num_preemptions += loop.scheduler.stats.num_preemptions
        aborted_when |= loop.aborted_when
        cache = loop.scheduler.prefix_cache
        num_hits += cache.stats.num_hit_tokens
        num_block_evictions += cache.blocks.num_evictions
        num_snapshot_evictions += cache.snapshots.num_evictions
    assert num_preemptions > 10
    often = {"waiting", "decode", "last token issued", "preempted", "replay", "finished"}
    assert aborted_when >= often
    if num_snapshots:
        assert num_hits > 500
        assert num_block_evictions > 100
        assert num_snapshot_evictions > 5 or num_snapshots > 2
    else:
        assert num_hits == num_block_evictions == 0
