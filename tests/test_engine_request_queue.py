"""RequestQueue: the order of who waits, and what is refused."""

from __future__ import annotations

import random

import pytest

from deltaserve.engine.request_queue import QueueFullError, RequestQueue, RequestTooLargeError
from deltaserve.engine.sampling_params import SamplingParams
from deltaserve.engine.sequence import Sequence

from .fake_runner import CAPACITY, make_seq


def waiting(name: str, priority: int = 0) -> Sequence:
    return Sequence(name, (1, 2, 3), SamplingParams(priority=priority))


def drain(queue: RequestQueue) -> list[str]:
    names = []
    while len(queue):
        assert queue.head is queue.head
        names.append(queue.pop_head().request_id)
    return names


def test_lower_priority_values_first_then_arrival() -> None:
    queue = RequestQueue(CAPACITY)
    for name, priority in [("a", 0), ("b", 5), ("c", -1), ("d", 0), ("e", -1)]:
        queue.add(waiting(name, priority))
    assert drain(queue) == ["c", "e", "a", "d", "b"]


def test_preempted_sequences_stay_in_front_of_any_priority() -> None:
    queue = RequestQueue(CAPACITY)
    queue.add(waiting("urgent", -100))
    queue.push_front(waiting("preempted first", 7))
    queue.push_front(waiting("preempted last", 7))
    assert drain(queue) == ["preempted last", "preempted first", "urgent"]


def test_removal_in_any_place_and_a_name_that_comes_back() -> None:
    queue = RequestQueue(CAPACITY)
    first = waiting("a", -5)
    queue.add(first)
    queue.add(waiting("b", 1))
    queue.push_front(waiting("c"))
    queue.remove(first)
    queue.add(waiting("a", 9))
    queue.remove(queue.head)
    assert drain(queue) == ["b", "a"]


def test_against_a_sorted_list() -> None:
    rng = random.Random(3)
    queue, model = RequestQueue(CAPACITY), list[tuple[int, int, Sequence]]()
    for number in range(2000):
        if len(model) < CAPACITY.max_queue and rng.random() < 0.6:
            seq = waiting(str(number), rng.randint(-2, 2))
            queue.add(seq)
            model.append((seq.params.priority, number, seq))
            model.sort(key=lambda entry: entry[:2])
        elif model and rng.random() < 0.5:
            assert queue.pop_head() is model.pop(0)[2]
        elif model:
            queue.remove(model.pop(rng.randrange(len(model)))[2])
        assert len(queue) == len(model)
        assert not model or queue.head is model[0][2]


def test_a_full_queue_refuses_and_stays_as_it_is() -> None:
    queue = RequestQueue(CAPACITY)
    for i in range(CAPACITY.max_queue):
        queue.add(waiting(str(i)))
    with pytest.raises(QueueFullError, match=f"limit is {CAPACITY.max_queue}"):
        queue.add(waiting("urgent", -1))
    assert drain(queue) == [str(i) for i in range(CAPACITY.max_queue)]


def test_a_prompt_without_output_may_fill_the_context() -> None:
    queue = RequestQueue(CAPACITY)
    ids = tuple(range(CAPACITY.max_model_len + 1))
    params = SamplingParams(max_tokens=0, prompt_logprobs=0)
    with pytest.raises(RequestTooLargeError, match="1025"):
        queue.add(Sequence("a", ids, params))
    queue.add(Sequence("b", ids[:-1], params))
    with pytest.raises(RequestTooLargeError):
        queue.add(make_seq("c", CAPACITY.max_model_len, 1))
