"""The scheduler's rules, one each, on small hand-made cases."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deltaserve.engine.prefill_chunks import prefill_budget
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.scheduled_batch import BlockUpdate
from deltaserve.engine.scheduler import (
    QueueFullError,
    RequestTooLargeError,
    Scheduler,
    SchedulerStats,
)
from deltaserve.engine.sequence import FinishReason, Sequence, TokenLogprobs

from .fake_runner import CAPACITY, decode_ids, make_loop, make_seq, prefill_ranges


class TestRefusal:
    def test_over_the_context_length_names_both_numbers_and_the_limit(self) -> None:
        scheduler = Scheduler(CAPACITY)
        with pytest.raises(RequestTooLargeError, match=r"1000 tokens.*25.*1025.*1024"):
            scheduler.add(make_seq("a", 1000, 25))
        assert not scheduler.has_work
        scheduler.add(make_seq("a", 1000, 24))

    def test_over_all_blocks_counts_no_block_for_the_last_token(self) -> None:
        scheduler = Scheduler(replace(CAPACITY, num_blocks=4, block_size=16))
        with pytest.raises(RequestTooLargeError, match=r"60 tokens.*6:.*5 cache blocks of 16.*4"):
            scheduler.add(make_seq("a", 60, 6))
        scheduler.add(make_seq("a", 60, 5))

    def test_full_queue(self) -> None:
        scheduler = Scheduler(replace(CAPACITY, max_queue=2), max_num_seqs=1)
        scheduler.add(make_seq("running", 10))
        scheduler.schedule()
        for request_id in "ab":
            scheduler.add(make_seq(request_id, 10))
        with pytest.raises(QueueFullError, match="2 requests are waiting and the limit is 2"):
            scheduler.add(make_seq("c", 10))
        assert scheduler.num_waiting == 2
        scheduler.abort("running")
        scheduler.add(make_seq("c", 10))

    def test_an_idle_engine_takes_a_burst_of_its_slots_and_its_queue(self) -> None:
        scheduler = Scheduler(replace(CAPACITY, max_queue=2), max_num_seqs=3)
        for number in range(3 + 2):
            scheduler.add(make_seq(str(number), 10))
        with pytest.raises(QueueFullError, match="2 requests are waiting and the limit is 2"):
            scheduler.add(make_seq("one more", 10))

    def test_too_large_wins_over_full(self) -> None:
        scheduler = Scheduler(replace(CAPACITY, max_queue=0))
        with pytest.raises(RequestTooLargeError):
            scheduler.add(make_seq("a", 1024))

    def test_request_id_in_use(self) -> None:
        scheduler = Scheduler(CAPACITY)
        scheduler.add(make_seq("a", 10))
        with pytest.raises(ValueError, match="'a' is in use"):
            scheduler.add(make_seq("a", 10))

    def test_empty_prompt(self) -> None:
        with pytest.raises(ValueError, match="at least one token"):
            Scheduler(CAPACITY).add(make_seq("a", 0))

    def test_no_sequences_at_all(self) -> None:
        with pytest.raises(ValueError, match="max_num_seqs"):
            Scheduler(CAPACITY, max_num_seqs=0)


class TestPrefill:
    def test_many_short_prompts_share_a_step(self) -> None:
        loop = make_loop(CAPACITY, *(make_seq(request_id, 100) for request_id in "abc"))
        batch = loop.step()
        assert prefill_ranges(batch) == [("a", 0, 100), ("b", 0, 100), ("c", 0, 100)]
        assert [seq.request_id for seq in batch.admitted] == ["a", "b", "c"]

    def test_full_budget_while_nothing_decodes_and_the_chunk_while_something_does(self) -> None:
        loop = make_loop(CAPACITY, make_seq("a", 600))
        assert prefill_ranges(loop.step()) == [("a", 0, 512)]
        assert prefill_ranges(loop.step()) == [("a", 512, 600)]
        loop.scheduler.add(make_seq("b", 600))
        batch = loop.step()
        assert (decode_ids(batch), prefill_ranges(batch)) == (["a"], [("b", 0, 128)])

    def test_budget_that_does_not_reach_the_next_boundary_takes_nothing(self) -> None:
        loop = make_loop(CAPACITY, make_seq("a", 500), make_seq("b", 100), make_seq("c", 5))
        assert prefill_ranges(loop.step()) == [("a", 0, 500)]  # 12 left: b waits, so c does too
        assert loop.scheduler.num_waiting == 2

    def test_chunks_end_on_the_absolute_grid_or_with_the_prompt(self) -> None:
        loop = make_loop(CAPACITY, make_seq("a", 100, 40), make_seq("b", 470))
        assert prefill_ranges(loop.step()) == [("a", 0, 100), ("b", 0, 384)]
        assert prefill_ranges(loop.step()) == [("b", 384, 470)]

    def test_prompts_under_way_go_before_new_ones(self) -> None:
        loop = make_loop(CAPACITY, make_seq("a", 10, 40), make_seq("b", 840), make_seq("c", 60))
        assert prefill_ranges(loop.step()) == [("a", 0, 10), ("b", 0, 448)]
        ranges = [prefill_ranges(loop.step()) for _ in range(4)]
        assert ranges == [
            [("b", 448, 576)],
            [("b", 576, 704)],
            [("b", 704, 832)],
            [("b", 832, 840), ("c", 0, 60)],
        ]

    def test_blocks_come_with_the_tokens_and_only_new_entries_are_sent(self) -> None:
        capacity = replace(CAPACITY, max_num_batched_tokens=128)
        loop = make_loop(capacity, make_seq("a", 130, 40))
        assert loop.step().block_updates == (BlockUpdate(0, 0, 0), BlockUpdate(0, 1, 1))
        assert loop.step().block_updates == (BlockUpdate(0, 2, 2),)
        assert loop.step().block_updates == ()


class TestAdmission:
    def test_waits_for_a_slot(self) -> None:
        scheduler = Scheduler(CAPACITY, max_num_seqs=1)
        scheduler.add(make_seq("a", 10))
        scheduler.add(make_seq("b", 10))
        assert prefill_ranges(scheduler.schedule()) == [("a", 0, 10)]
        scheduler.abort("a")
        assert prefill_ranges(scheduler.schedule()) == [("b", 0, 10)]

    @pytest.mark.parametrize(("num_blocks", "admitted"), [(9, True), (8, False)])
    def test_leaves_running_sequences_what_they_lack_and_a_block_each(
        self, num_blocks: int, admitted: bool
    ) -> None:
        """After their first chunks a and b hold 3 blocks, b lacks 3, 2 are reserved, c wants 1."""
        capacity = replace(CAPACITY, num_blocks=num_blocks, max_num_batched_tokens=192)
        loop = make_loop(capacity, make_seq("a", 1), make_seq("b", 320), make_seq("c", 63))
        expected = [("a", 0, 1), ("b", 0, 128), ("c", 0, 63)]
        assert prefill_ranges(loop.step()) == expected[: 2 + admitted]

    def test_takes_all_blocks_when_nothing_else_runs(self) -> None:
        loop = make_loop(replace(CAPACITY, num_blocks=5), make_seq("a", 320, 1))
        assert prefill_ranges(loop.step()) == [("a", 0, 320)]


class TestOverlap:
    def test_an_unread_id_is_fed_from_the_device(self) -> None:
        loop = make_loop(CAPACITY, make_seq("a", 70))
        assert loop.step().prefills[0].sample
        (row,) = loop.step().decodes
        assert (row.position, row.input_id, row.sample) == (70, -1, True)

    def test_a_read_id_is_fed_by_the_host(self) -> None:
        seq = make_seq("a", 70)
        loop = make_loop(CAPACITY, seq, depth=0)
        loop.step()
        assert loop.step().decodes[0].input_id == seq.output_ids[0]

    def test_nothing_is_issued_beyond_max_tokens(self) -> None:
        seq = make_seq("a", 10, 2)
        loop = make_loop(CAPACITY, seq, depth=3)
        assert [loop.step().num_tokens for _ in range(3)] == [10, 1, 0]
        assert (seq.num_sampled, seq.output_ids, loop.scheduler.has_work) == (2, [], True)
        loop.finish()
        assert len(loop.token_ids(seq)) == 2

    def test_the_slot_is_free_while_the_last_id_is_unread(self) -> None:
        scheduler = Scheduler(CAPACITY, max_num_seqs=1)
        first, second = make_seq("a", 10, 1), make_seq("b", 10, 1)
        scheduler.add(first)
        scheduler.add(second)
        batches = [scheduler.schedule(), scheduler.schedule()]
        assert [prefill_ranges(batch) for batch in batches] == [[("a", 0, 10)], [("b", 0, 10)]]
        assert [scheduler.update(batch, [5])[0].token_ids for batch in batches] == [(5,), (5,)]

    def test_the_extra_token_after_an_end_is_dropped(self) -> None:
        scheduler = Scheduler(CAPACITY)
        seq = make_seq("a", 10, 4, stop_ids=(9,))
        scheduler.add(seq)
        first, second = scheduler.schedule(), scheduler.schedule()
        (output,) = scheduler.update(first, [9])
        assert (output.token_ids, output.finish_reason, output.stop_id) == (
            (9,),
            FinishReason.STOP,
            9,
        )
        assert scheduler.stats == SchedulerStats(0, 0, 0, 0, 0)
        assert scheduler.update(second, [8]) == []
        assert seq.output_ids == [9]


class TestEnd:
    def test_length(self) -> None:
        loop = make_loop(CAPACITY, make_seq("a", 10, 3))
        loop.finish()
        reasons = [output.finish_reason for output in loop.outputs["a"]]
        assert reasons == [None, None, FinishReason.LENGTH]

    def test_an_end_id_as_the_last_token_is_a_stop(self) -> None:
        scheduler = Scheduler(CAPACITY)
        scheduler.add(make_seq("a", 10, 1, stop_ids=(9,)))
        (output,) = scheduler.update(scheduler.schedule(), [9])
        assert output.finish_reason is FinishReason.STOP

    def test_ignore_eos(self) -> None:
        scheduler = Scheduler(CAPACITY)
        params = SamplingParams(max_tokens=2, ignore_eos=True)
        scheduler.add(Sequence("a", (1,), params, frozenset({9})))
        (output,) = scheduler.update(scheduler.schedule(), [9])
        assert (output.finish_reason, output.stop_id) == (None, None)

    def test_non_finite_logits_end_that_request_alone(self) -> None:
        scheduler = Scheduler(CAPACITY)
        scheduler.add(make_seq("a", 10))
        scheduler.add(make_seq("b", 10))
        first, second = scheduler.schedule(), scheduler.schedule()
        bad, good = scheduler.update(first, [-1, 7])
        assert (bad.token_ids, bad.finish_reason) == ((), FinishReason.ERROR)
        assert bad.error is not None and "not finite" in bad.error
        assert (good.token_ids, good.finish_reason, good.error) == ((7,), None, None)
        assert [output.request_id for output in scheduler.update(second, [-1, 7])] == ["b"]

    def test_logprobs_go_with_their_token(self) -> None:
        scheduler = Scheduler(CAPACITY)
        scheduler.add(make_seq("a", 10))
        scheduler.add(make_seq("b", 10))
        entry = TokenLogprobs(-0.5, (7,), (-0.5,))
        first, second = scheduler.update(scheduler.schedule(), [3, 7], [None, entry])
        assert (first.logprobs, second.logprobs) == ((), (entry,))

    def test_a_request_id_can_be_used_again_while_the_old_one_is_in_flight(self) -> None:
        scheduler = Scheduler(CAPACITY)
        scheduler.add(make_seq("a", 10))
        old = scheduler.schedule()
        scheduler.abort("a")
        scheduler.add(make_seq("a", 10))
        new = scheduler.schedule()
        assert scheduler.update(old, [5]) == []
        assert [output.token_ids for output in scheduler.update(new, [6])] == [(6,)]


@pytest.mark.parametrize(
    ("num_decodes", "num_prompts", "tokens"),
    [
        (0, 1, 8192),
        (1, 1, 1024),
        (11, 1, 1024),
        (12, 1, 2048),
        (47, 1, 7168),
        (48, 1, 8192),
        (256, 4, 8192),
        (4, 3, 1024),
        (4, 15, 1024),
        (4, 16, 2048),
        (1, 15, 7168),
        (20, 20, 3072),
        (1, 255, 8192),
    ],
)
def test_prompt_tokens_beside_so_many_decodes(
    num_decodes: int, num_prompts: int, tokens: int
) -> None:
    capacity = replace(CAPACITY, max_num_batched_tokens=8192, prefill_chunk=1024)
    assert prefill_budget(capacity, num_decodes, num_prompts) == tokens


def with_one_that_decodes(**changes: int) -> Scheduler:
    scheduler = Scheduler(replace(CAPACITY, prefill_chunk=64, num_state_slots=8, **changes))
    scheduler.add(make_seq("first", 10))
    scheduler.update(scheduler.schedule(), [5])
    return scheduler


def test_many_waiting_prompts_are_not_held_up_for_one_that_decodes() -> None:
    scheduler = with_one_that_decodes()
    for name in "abcd":
        scheduler.add(make_seq(name, 64))
    assert [p.sequence.request_id for p in scheduler.schedule().prefills] == ["a", "b"]


def test_prompts_that_lack_blocks_do_not_make_another_ones_chunks_longer() -> None:
    """All blocks but one are held by the first or owed to the long prompt."""
    scheduler = with_one_that_decodes(num_blocks=6)
    scheduler.add(make_seq("long", 256))
    scheduler.schedule()
    for name in "abcd":
        scheduler.add(make_seq(name, 64))
    (prefill,) = scheduler.schedule().prefills
    assert (prefill.sequence.request_id, prefill.start, prefill.end) == ("long", 64, 128)
