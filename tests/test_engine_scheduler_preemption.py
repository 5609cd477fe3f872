"""Preemption by replay, and aborts in every state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from deltaserve.engine.scheduler import SchedulerStats
from deltaserve.engine.sequence import Sequence, SequenceStatus

from .fake_runner import (
    CAPACITY,
    OverlappedLoop,
    decode_ids,
    make_loop,
    make_seq,
    prefill_ranges,
)

# Holds two sequences of two blocks each, until the older one needs its third.
FOUR_BLOCKS = replace(CAPACITY, num_blocks=4, block_size=16)


def run_to_preemption(
    *waiting: Sequence, depth: int = 1
) -> tuple[OverlappedLoop, Sequence, Sequence]:
    """Two sequences of which the older has just taken the younger's blocks."""
    older, younger = make_seq("older", 20, 30), make_seq("younger", 10, 30)
    loop = make_loop(FOUR_BLOCKS, older, younger, *waiting, depth=depth)
    for _ in range(30):
        loop.launch() if depth > 1 else loop.step()
        if younger.num_preemptions:
            return loop, older, younger
    raise AssertionError("nobody was preempted")


class TestPreemption:
    def test_the_youngest_goes_back_to_the_front_of_the_queue(self) -> None:
        loop, older, younger = run_to_preemption(make_seq("third", 1))
        assert (older.status, younger.status) == (SequenceStatus.RUNNING, SequenceStatus.WAITING)
        assert (younger.block_table, younger.state_slot, younger.num_computed_tokens) == ([], -1, 0)
        assert younger.num_sampled == len(younger.output_ids) > 1
        loop.scheduler.abort("older")
        assert prefill_ranges(loop.step()) == [("younger", 0, 10), ("third", 0, 1)]

    def test_replay_feeds_the_known_tokens_and_samples_only_the_next(self) -> None:
        loop, _, younger = run_to_preemption()
        loop.scheduler.abort("older")
        known = list(younger.output_ids)
        (prefill,) = loop.step().prefills
        assert (prefill.start, prefill.end, prefill.sample) == (0, 10, False)
        rows = [loop.step().decodes[0] for _ in known]
        assert [row.input_id for row in rows] == known
        assert [row.position for row in rows] == list(range(10, 10 + len(known)))
        assert [row.sample for row in rows] == [False] * (len(known) - 1) + [True]
        loop.finish()
        model, params = loop.runner.model, younger.params
        assert (
            loop.token_ids(younger)
            == model.generate_alone(younger.prompt_ids, params, frozenset())[0]
        )

    @pytest.mark.parametrize(("num_prompt", "admitted"), [(16, True), (17, False)])
    def test_admission_leaves_a_replay_its_blocks(self, num_prompt: int, admitted: bool) -> None:
        """Three blocks are free; the replay lacks one and one is reserved for it."""
        loop, _, younger = run_to_preemption()
        loop.scheduler.abort("older")
        loop.step()
        assert (younger.num_tokens, len(younger.block_table)) == (23, 1)
        loop.scheduler.add(make_seq("new", num_prompt))
        assert bool(loop.step().admitted) is admitted

    def test_not_admitted_again_before_its_ids_are_read(self) -> None:
        loop, _, younger = run_to_preemption(depth=100)
        loop.scheduler.abort("older")
        assert len(younger.output_ids) < younger.num_sampled
        assert loop.launch().is_empty
        while loop.in_flight:
            loop.read()
        assert prefill_ranges(loop.launch()) == [("younger", 0, 10)]

    def test_may_end_by_an_id_read_after_it(self) -> None:
        loop, _, younger = run_to_preemption(depth=100)
        younger.stop_ids = frozenset(range(50))
        loop.read()
        assert younger.status is SequenceStatus.FINISHED
        assert loop.scheduler.num_waiting == 0

    def test_the_youngest_waits_in_place_for_a_block(self) -> None:
        older, younger = make_seq("older", 31, 12), make_seq("younger", 26, 30)
        loop = make_loop(replace(FOUR_BLOCKS, num_blocks=5), older, younger)
        rows = [decode_ids(loop.step()) for _ in range(13)]
        assert rows == [[], *[["older", "younger"]] * 6, *[["older"]] * 5, ["younger"]]
        assert loop.scheduler.stats.num_preemptions == 0
        loop.finish()
        assert len(loop.token_ids(younger)) == 30

    def test_a_prompt_takes_the_free_blocks_before_it_preempts(self) -> None:
        """Six younger sequences take two blocks each while a long prompt is under way; eight
        were left for them. So the prompt lacks four: half a chunk."""
        capacity = replace(
            CAPACITY,
            num_blocks=338,
            block_size=16,
            num_state_slots=8,
            max_model_len=8192,
            max_num_batched_tokens=128,
        )
        older, younger = make_seq("older", 5184), [make_seq(str(i), 1, 60) for i in range(6)]
        loop = make_loop(capacity, make_seq("first", 1, 1), older, *younger)
        while older.num_computed_tokens < 5184 - 128:
            loop.step()
        assert loop.scheduler.num_running == 7
        assert ("older", 5056, 5120) in prefill_ranges(loop.step())
        assert loop.scheduler.stats.num_preemptions == 0
        batch = loop.step()
        assert prefill_ranges(batch) == [("older", 5120, 5184)]
        assert decode_ids(batch) == ["0", "1", "2", "3"]
        loop.finish()


Setup = Callable[[], tuple[OverlappedLoop, Sequence]]


def waiting() -> tuple[OverlappedLoop, Sequence]:
    seq = make_seq("target", 30)
    loop = make_loop(replace(CAPACITY, num_state_slots=1), make_seq("other", 10), seq)
    loop.step()
    assert seq.status is SequenceStatus.WAITING
    return loop, seq


def prefill() -> tuple[OverlappedLoop, Sequence]:
    seq = make_seq("target", 600)
    loop = make_loop(CAPACITY, seq, make_seq("other", 10))
    loop.step()
    assert seq.in_prefill and seq.block_table
    return loop, seq


def decode() -> tuple[OverlappedLoop, Sequence]:
    seq = make_seq("target", 30, 20)
    loop = make_loop(CAPACITY, make_seq("other", 10), seq)
    for _ in range(3):
        loop.step()
    assert decode_ids(loop.step()) == ["other", "target"]
    return loop, seq


def preempted() -> tuple[OverlappedLoop, Sequence]:
    loop, _, seq = run_to_preemption()
    assert len(seq.output_ids) == seq.num_sampled
    return loop, seq


def preempted_with_an_unread_id() -> tuple[OverlappedLoop, Sequence]:
    loop, _, seq = run_to_preemption(depth=100)
    loop.depth = 1
    assert len(seq.output_ids) < seq.num_sampled
    return loop, seq


def replay() -> tuple[OverlappedLoop, Sequence]:
    loop, seq = preempted()
    loop.scheduler.abort("older")
    loop.step()
    assert not loop.step().decodes[0].sample
    return loop, seq


def last_token_issued() -> tuple[OverlappedLoop, Sequence]:
    seq = make_seq("target", 30, 1)
    loop = make_loop(CAPACITY, seq, make_seq("other", 10))
    loop.step()
    assert seq.num_sampled == 1 and seq.state_slot >= 0
    return loop, seq


def last_token_issued_and_slot_given_up() -> tuple[OverlappedLoop, Sequence]:
    loop, seq = last_token_issued()
    loop.launch()
    assert seq.status is SequenceStatus.RUNNING and seq.state_slot < 0
    return loop, seq


@pytest.mark.parametrize(
    "setup",
    [
        waiting,
        prefill,
        decode,
        preempted,
        preempted_with_an_unread_id,
        replay,
        last_token_issued,
        last_token_issued_and_slot_given_up,
    ],
)
def test_abort_frees_everything_at_once(setup: Setup) -> None:
    loop, seq = setup()
    before, seen = loop.scheduler.stats, loop.token_ids(seq)
    num_blocks, holds_slot = len(seq.block_table), seq.state_slot >= 0
    was_waiting = seq.status is SequenceStatus.WAITING
    assert loop.scheduler.abort(seq.request_id)
    assert loop.scheduler.stats == SchedulerStats(
        num_waiting=before.num_waiting - was_waiting,
        num_running=before.num_running - holds_slot,
        num_blocks_used=before.num_blocks_used - num_blocks,
        num_slots_used=before.num_slots_used - holds_slot,
        num_preemptions=before.num_preemptions,
    )
    assert (seq.block_table, seq.state_slot) == ([], -1)
    assert not loop.scheduler.abort(seq.request_id)
    loop.finish()
    assert loop.scheduler.stats == SchedulerStats(0, 0, 0, 0, before.num_preemptions)
    assert loop.token_ids(seq) == seen


def test_abort_of_a_finished_sequence_that_a_step_still_holds() -> None:
    seq = make_seq("target", 30, 20, stop_ids=tuple(range(50)))
    loop = make_loop(CAPACITY, seq)
    loop.step()
    assert loop.step().decodes[0].sequence is seq
    assert seq.status is SequenceStatus.FINISHED
    assert not loop.scheduler.abort("target")
    loop.finish()
    assert len(loop.token_ids(seq)) == 1


def test_abort_of_an_unknown_request() -> None:
    assert not make_loop(CAPACITY).scheduler.abort("nobody")
