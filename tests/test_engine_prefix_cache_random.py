"""Prefix caching under random workloads: shared prefixes, salts, evictions, preemption and aborts.

Each request gives the tokens and the logits bits that it gives alone with the cache off.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deltaserve.engine.sampling_params import SamplingParams
from tests.prefix_cache_checks import check_pools
from tests.tiny_engine import DelayingDevice, assert_idle, write_tiny_model

from .test_engine_prefix_cache import Prompt, Recorder, random_ids, slot_bytes_of


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


@dataclass(frozen=True)
class Request:
    name: str
    prompt: Prompt
    params: SamplingParams


ADJUSTMENTS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.5, "frequency_penalty": 1.0},
    {
        "allowed_token_ids": tuple(range(12)),
        "bad_words": tuple((i, j) for i in range(12) for j in range(i % 2, 12, 2)),
    },
    {},
)
"""What depends on the prompt and the output so far, on the device and on the host."""


def random_requests(rng: random.Random, count: int) -> list[Request]:
    """A tree of prompts: each takes an earlier one's beginning, of any length, and goes on."""
    requests: list[Request] = []
    for number in range(count):
        parent = rng.choice(requests).prompt if requests and rng.random() < 0.9 else ()
        cut = rng.choice([len(parent), len(parent) // 64 * 64, rng.randint(0, len(parent))])
        own = rng.choice([1, 20, 64, 130, rng.randint(60, 150)])
        prompt = (*parent[:cut], *random_ids(own, rng.getrandbits(32)))[:250]
        params = SamplingParams(
            max_tokens=rng.choice([1, 5, 40, 130]),
            temperature=rng.choice([0.0, 1.0]),
            seed=number,
            ignore_eos=True,
            cache_salt=rng.choice([None] * 5 + ["salt"]),
            prompt_logprobs=rng.choice([None] * 5 + [0]),
            **ADJUSTMENTS[number % len(ADJUSTMENTS)],
        )
        requests.append(Request(str(number), prompt, params))
    return requests


def play(recorder: Recorder, requests: list[Request], rng: random.Random, name: str) -> set[str]:
    """Random arrivals and aborts; the names of those that ended by themselves."""
    engine, waiting = recorder.engine, list(requests)
    aborted = set()
    while waiting or engine.has_work:
        while waiting and rng.random() < 0.35:
            request = waiting.pop(0)
            engine.add_request(name + request.name, request.prompt, request.params)
        recorder.step()
        check_pools(engine._scheduler)
        if rng.random() < 0.01 and engine.open_sequences:
            victim = rng.choice(engine.open_sequences).request_id
            engine.abort(victim)
            aborted.add(victim)
            check_pools(engine._scheduler)
    assert_idle(engine)
    return {request.name for request in requests if name + request.name not in aborted}


@pytest.mark.parametrize(
    ("seed", "num_blocks", "max_num_seqs", "num_snapshots", "interval", "batched_tokens"),
    [(14, 6, 6, 20, 64, 128), (19, 6, 6, 2, 64, 128)],
)
def test_random_workloads_are_equal_off_on_and_warm(
    directory: Path,
    seed: int,
    num_blocks: int,
    max_num_seqs: int,
    num_snapshots: int,
    interval: int,
    batched_tokens: int,
) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng, 16)
    alone = Recorder.make(directory, enable_prefix_caching=False, max_num_seqs=1)
    for request in requests:
        alone.run(request.name, request.prompt, **dataclasses.asdict(request.params))
    alone.engine.close()

    recorder = Recorder.make(
        directory,
        DelayingDevice() if seed % 2 else None,
        num_blocks=num_blocks,
        max_model_len=384,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=batched_tokens,
        prefill_chunk=64,
        snapshot_interval=interval,
        snapshot_memory=num_snapshots * slot_bytes_of(directory),
    )
    for round_name in ("cold ", "warm "):
        ended = play(recorder, requests, rng, round_name)
        assert len(ended) > 6
        for request in requests:
            ids, hashes = alone.result(request.name)
            name = round_name + request.name
            if request.name in ended:
                assert recorder.result(name) == (ids, hashes)
            else:
                assert recorder.ids.get(name, []) == ids[: len(recorder.ids.get(name, []))]
    stats = recorder.engine.stats()
    recorder.engine.close()
    assert stats.num_prefix_hit_tokens > 500
    assert stats.num_preemptions > 0
    assert stats.num_block_evictions > 0
