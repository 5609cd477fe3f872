"""Overlap: a step is scheduled and submitted before the ids of the one before it are seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deltaserve.engine.llm_engine import LLMEngine
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.scheduled_batch import ScheduledBatch
from deltaserve.engine.scheduler import Scheduler
from deltaserve.engine.sequence import FinishReason
from tests.tiny_engine import (
    DelayingDevice,
    assert_idle,
    engine_config,
    run_to_end,
    token_ids,
    write_tiny_model,
)

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def device() -> DelayingDevice:
    return DelayingDevice()


@pytest.fixture
def batches(device: DelayingDevice, monkeypatch: pytest.MonkeyPatch) -> list[ScheduledBatch]:
    """The batches of all steps; schedule and update are noted among the device's events."""
    found: list[ScheduledBatch] = []
    schedule, update = Scheduler.schedule, Scheduler.update

    def noted_schedule(self: Scheduler) -> ScheduledBatch:
        batch = schedule(self)
        if not batch.is_empty:
            device.events.append(("schedule", len(found)))
            found.append(batch)
        return batch

    def noted_update(self: Scheduler, batch: ScheduledBatch, *args: Any) -> Any:
        device.events.append(("update", found.index(batch)))
        return update(self, batch, *args)

    monkeypatch.setattr(Scheduler, "schedule", noted_schedule)
    monkeypatch.setattr(Scheduler, "update", noted_update)
    return found


def test_the_next_step_is_submitted_before_the_last_one_is_read(
    directory: Path, device: DelayingDevice, batches: list[ScheduledBatch]
) -> None:
    """A lone sequence too: six tokens are six steps, each but the first begun without its input."""
    engine = LLMEngine(engine_config(directory), device=device)
    engine.add_request("a", [1, 2, 3], GREEDY)
    run_to_end(engine)
    expected = [("schedule", 0), ("submit", 0)]
    for n in range(1, 6):
        expected += [("schedule", n), ("submit", n), ("wait", n - 1), ("update", n - 1)]
    assert device.events == [*expected, ("wait", 5), ("update", 5)]
    assert [d.input_id for batch in batches for d in batch.decodes] == [-1] * 5
    engine.close()


def test_at_most_one_step_is_unread(
    directory: Path, device: DelayingDevice, batches: list[ScheduledBatch]
) -> None:
    engine = LLMEngine(engine_config(directory), device=device)
    for i in range(6):
        engine.add_request(str(i), range(1, 40 * i + 5), GREEDY)
    run_to_end(engine)
    unread = most = 0
    for what, _ in device.events:
        unread += {"submit": 1, "wait": -1}.get(what, 0)
        most = max(most, unread)
    assert most == 2  # the one being read and the one behind it
    assert unread == 0
    engine.close()


def test_the_first_step_gives_nothing_and_later_ones_the_step_before(
    directory: Path, device: DelayingDevice
) -> None:
    engine = LLMEngine(engine_config(directory), device=device)
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=2))
    assert engine.step() == []
    assert len(engine.step()) == 1
    [last] = engine.step()
    assert last.finish_reason is FinishReason.LENGTH
    assert_idle(engine)
    assert engine.step() == []
    engine.close()


def test_delay_changes_no_token(directory: Path) -> None:
    def run(**options: Any) -> dict[str, list[int]]:
        engine = LLMEngine(engine_config(directory), **options)
        for i in range(5):
            params = SamplingParams(seed=i, max_tokens=9, ignore_eos=True)
            engine.add_request(str(i), range(1, 30 * i + 5), params)
        ids = {name: token_ids(outputs) for name, outputs in run_to_end(engine).items()}
        engine.close()
        return ids

    assert run() == run(device=DelayingDevice())


def stop_at(directory: Path, index: int) -> Callable[[LLMEngine], tuple[int, ...]]:
    """Makes an engine end at the token of this index, which greedy decoding of [1, 2, 3] gives."""
    engine = LLMEngine(engine_config(directory))
    engine.add_request("a", [1, 2, 3], GREEDY)
    ids = token_ids(run_to_end(engine)["a"])
    engine.close()
    assert ids[index] not in ids[:index]

    def change(engine: LLMEngine) -> tuple[int, ...]:
        engine.end_ids = frozenset({ids[index]})
        return tuple(ids[: index + 1])

    return change


def test_the_token_issued_beyond_an_end_id_is_dropped(
    directory: Path, device: DelayingDevice, batches: list[ScheduledBatch]
) -> None:
    change = stop_at(directory, 2)
    batches.clear()
    device.events.clear()
    engine = LLMEngine(engine_config(directory), device=device)
    expected = change(engine)
    params = SamplingParams(temperature=0.0, max_tokens=50)
    engine.add_request("a", [1, 2, 3], params)
    outputs = run_to_end(engine)["a"]
    assert tuple(token_ids(outputs)) == expected
    assert (outputs[-1].finish_reason, outputs[-1].stop_id) == (FinishReason.STOP, expected[-1])
    assert len(batches) == len(expected) + 1  # the step that was in flight
    assert_idle(engine)
    engine.close()


def test_a_slot_freed_under_a_step_in_flight_can_be_used_by_the_next(
    directory: Path, device: DelayingDevice
) -> None:
    """One slot: "b" takes it while the step that still writes "a" there has not run."""

    def alone(prompt: list[int]) -> list[int]:
        engine = LLMEngine(engine_config(directory))
        engine.add_request("x", prompt, GREEDY)
        ids = token_ids(run_to_end(engine)["x"])
        engine.close()
        return ids

    expected = alone([7, 8, 9])
    engine = LLMEngine(engine_config(directory, max_num_seqs=1), device=device)
    engine.add_request("a", [1, 2, 3], GREEDY)
    engine.add_request("b", [7, 8, 9], GREEDY)
    engine.step()
    engine.step()
    engine.abort("a")
    outputs = run_to_end(engine)
    assert "a" not in outputs
    assert token_ids(outputs["b"]) == expected
    assert_idle(engine)
    engine.close()
