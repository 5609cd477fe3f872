"""Prefix caching on the engine: the same tokens and logits bits with the cache off, on and warm.

The hash of each sampled row's logits is compared, so a state or a key from another boundary, or one
that a decode step made, shows at once.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltaserve.engine.config import ModelConfig
from deltaserve.engine.llm_engine import LLMEngine
from deltaserve.engine.memory_plan import CPU
from deltaserve.engine.memory_sizes import slot_bytes
from deltaserve.engine.sampling_params import SamplingParams
from tests.prefix_cache_checks import check_pools
from tests.tiny_checkpoint import NUM_TOKENS
from tests.tiny_engine import (
    DelayingDevice,
    assert_idle,
    engine_config,
    run_to_end,
    write_tiny_model,
)

Prompt = tuple[int, ...]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


def random_ids(length: int, seed: int) -> Prompt:
    rng = random.Random(seed)
    return tuple(rng.randrange(NUM_TOKENS) for _ in range(length))


@dataclass
class Recorder:
    """An engine whose results are kept: ids, and hashes of logits rows by position."""

    engine: LLMEngine
    rows: dict[tuple[str, int], str]
    ids: dict[str, list[int]] = field(default_factory=dict)
    cached: dict[str, int] = field(default_factory=dict)

    @classmethod
    def make(cls, directory: Path, device: Any = None, **options: Any) -> Recorder:
        rows: dict[tuple[str, int], str] = {}

        def note(name: str, position: int, row: np.ndarray) -> None:
            rows[name, position] = hashlib.sha256(row.tobytes()).hexdigest()

        defaults = {"max_model_len": 2048, "max_num_batched_tokens": 512}
        config = engine_config(directory, **{**defaults, **options})
        return cls(LLMEngine(config, device=device, logits_hook=note), rows)

    def step(self) -> None:
        for output in self.engine.step():
            name = output.request_id
            self.ids.setdefault(name, []).extend(output.token_ids)
            self.cached[name] = self.cached.get(name, 0) + output.num_cached_tokens

    def run(self, name: str, prompt: Prompt, **params: Any) -> tuple[list[int], list[str]]:
        """Ids and row hashes of a request that runs alone."""
        defaults = {"max_tokens": 3, "temperature": 0.0, "ignore_eos": True}
        self.engine.add_request(name, prompt, SamplingParams(**{**defaults, **params}))
        while self.engine.has_work:
            self.step()
        return self.result(name)

    def result(self, name: str) -> tuple[list[int], list[str]]:
        return self.ids[name], [self.rows[key] for key in sorted(self.rows) if key[0] == name]


@pytest.fixture
def warm(directory: Path) -> Iterator[Recorder]:
    recorder = Recorder.make(directory)
    yield recorder
    assert_idle(recorder.engine)
    check_pools(recorder.engine._scheduler)
    recorder.engine.close()


@pytest.fixture(scope="module")
def off(directory: Path) -> Iterator[Recorder]:
    recorder = Recorder.make(directory, enable_prefix_caching=False)
    yield recorder
    assert recorder.engine.stats().num_prefix_query_tokens == 0
    recorder.engine.close()


LENGTHS = (63, 64, 65, 127, 128, 129, 1023, 1024, 1025)


@pytest.mark.parametrize("shared", LENGTHS)
def test_every_border_of_prompt_and_match(warm: Recorder, off: Recorder, shared: int) -> None:
    """Prompts that share `shared` tokens, and end right there or later: equal, and what can be a
    hit is one. The grid is of 64 tokens and one token is left to compute."""
    prefix = random_ids(shared, 1)
    prompts = [prefix + random_ids(length, 100 + length) for length in (5, 70, 200)]
    prompts += [prefix, prefix + random_ids(1, 7), prefix]
    for number, prompt in enumerate(prompts):
        name = f"{shared}-{number}"
        assert warm.run(name, prompt) == off.run(name, prompt)
    reach = [shared // 64 * 64, (shared - 1) // 64 * 64]
    # The second prompt leaves the first one's KV where their common blocks end, which is where the
    # third one starts; the last ones repeat the prefix itself.
    assert warm.cached[f"{shared}-2"] == reach[0]
    assert warm.cached[f"{shared}-3"] == reach[1]
    assert warm.cached[f"{shared}-4"] == reach[0]
    assert warm.cached[f"{shared}-5"] == reach[1]


def test_a_second_sighting_starts_at_the_last_snapshot_within_it(
    warm: Recorder, off: Recorder
) -> None:
    prefix = random_ids(1100, 3)
    for number in range(2):
        prompt = prefix + random_ids(150, 10 + number)
        assert warm.run(str(number), prompt) == off.run(f"second-{number}", prompt)
    assert warm.cached == {"0": 0, "1": 1024}


def test_a_chat_hits_all_but_the_end_of_its_previous_turn(warm: Recorder, off: Recorder) -> None:
    prompt, previous = random_ids(300, 4), 0
    for turn in range(4):
        name = f"turn-{turn}"
        ids, _ = warm.run(name, prompt, max_tokens=20)
        assert warm.result(name) == off.run(name, prompt, max_tokens=20)
        assert warm.cached[name] >= previous - 16 - 63
        previous = len(prompt)
        prompt = (*prompt, *ids, *random_ids(30, 40 + turn))


def test_the_interval_is_kept(directory: Path, off: Recorder) -> None:
    dense = Recorder.make(directory, snapshot_interval=128)
    prefix = random_ids(500, 5)
    for number in range(2):
        prompt = prefix + random_ids(90, 20 + number)
        assert dense.run(str(number), prompt) == off.run(f"dense-{number}", prompt)
    assert dense.cached["1"] == 384
    dense.engine.close()


def test_salts_do_not_see_each_other(warm: Recorder) -> None:
    prompt = random_ids(200, 6)
    for name, salt in [("a", "x"), ("b", "y"), ("c", None), ("d", "x")]:
        warm.run(name, prompt, cache_salt=salt)
    assert [warm.cached[name] for name in "abcd"] == [0, 0, 0, 128]


def test_prompt_logprobs_are_of_the_whole_prompt(warm: Recorder) -> None:
    prompt = random_ids(200, 7)
    engine = warm.engine
    warm.run("a", prompt)
    engine.add_request("b", prompt, SamplingParams(max_tokens=1, prompt_logprobs=1))
    (output,) = run_to_end(engine)["b"]
    assert (len(output.prompt_logprobs), output.num_cached_tokens) == (199, 0)
    warm.run("c", prompt)
    assert warm.cached["c"] == 128
    assert engine.stats().num_prefix_query_tokens == 400


def test_what_decode_computed_is_not_shared(warm: Recorder, off: Recorder) -> None:
    """A prompt that repeats another's output runs it through prefill, whose bits are its own."""
    prompt = random_ids(130, 8)
    ids, _ = warm.run("a", prompt, max_tokens=130)
    longer = (*prompt, *ids)
    assert warm.run("b", longer) == off.run("longer", longer)
    assert warm.cached["b"] == 64


def test_a_prefix_is_found_while_its_writer_runs_and_after_its_abort(
    directory: Path, off: Recorder
) -> None:
    """In the step after the one that writes it, though the device has run neither."""
    prefix = random_ids(256, 9)
    prompts = [prefix + random_ids(300, 50), prefix + random_ids(20, 51), (*prefix, 3)]
    device = DelayingDevice()
    recorder = Recorder.make(
        directory, device, max_num_batched_tokens=256, prefill_chunk=256, snapshot_interval=64
    )
    engine = recorder.engine
    params = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)
    engine.add_request("0", prompts[0], params)
    recorder.step()  # its first chunk is submitted
    engine.abort("0")
    engine.add_request("1", prompts[1], params)
    engine.add_request("2", prompts[2], params)
    while engine.has_work:
        recorder.step()
    assert recorder.cached["1"] == 256
    assert recorder.cached["2"] == 256
    for number in (1, 2):
        assert recorder.result(str(number)) == off.run(f"abort-{number}", prompts[number])
    check_pools(engine._scheduler)
    engine.close()


def test_of_equal_prompts_that_arrive_together_one_is_computed(
    directory: Path, off: Recorder
) -> None:
    recorder = Recorder.make(directory)
    prompt = random_ids(120, 11)
    names = ("a", "b", "c", "d")
    for number, name in enumerate(names):
        params = SamplingParams(max_tokens=5, seed=number, ignore_eos=True)
        recorder.engine.add_request(name, prompt, params)
    while recorder.engine.has_work:
        recorder.step()
    assert recorder.cached == {"a": 0, "b": 64, "c": 64, "d": 64}
    for number, name in enumerate(names):
        expected = off.run(f"together-{name}", prompt, max_tokens=5, temperature=1.0, seed=number)
        assert recorder.result(name) == expected
    recorder.engine.close()


def test_stats_count_tokens_and_evictions(directory: Path) -> None:
    recorder = Recorder.make(
        directory,
        num_blocks=10,
        max_model_len=384,
        snapshot_interval=64,
        snapshot_memory=2 * slot_bytes_of(directory),
    )
    assert recorder.engine.capacity.num_snapshots == 2
    for number in range(4):
        recorder.run(str(number), random_ids(200, 60 + number))
        recorder.run(f"{number} again", random_ids(200, 60 + number))
    stats = recorder.engine.stats()
    assert stats.num_prefix_query_tokens == stats.num_prompt_tokens == 8 * 200
    assert stats.num_prefix_hit_tokens == 4 * 192
    assert stats.num_block_evictions > 0
    assert stats.num_snapshot_evictions > 0
    assert (stats.num_snapshots, stats.num_free_snapshots) == (2, 0)
    assert stats.num_cached_blocks > 0
    recorder.engine.close()


def slot_bytes_of(directory: Path) -> int:
    return slot_bytes(ModelConfig.from_hf(directory), CPU.act)
