"""Row invariance: what a request gets does not depend on what else runs.

Random arrivals, budgets, aborts and too few blocks; for each (request, position) the token id and
the sha256 of the fp32 logits row are those of the request run alone, in one chunk, with room.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltaserve.engine.config import EngineConfig
from deltaserve.engine.llm_engine import LLMEngine
from deltaserve.engine.sampling_params import SamplingParams
from tests.tiny_checkpoint import NUM_TOKENS
from tests.tiny_engine import (
    DelayingDevice,
    assert_idle,
    engine_config,
    run_to_end,
    token_ids,
    write_tiny_model,
)

Hashes = dict[tuple[str, int], str]


@dataclass(frozen=True)
class Request:
    name: str
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass
class Run:
    """Token ids by request, and the hash of the logits row behind each position."""

    ids: dict[str, list[int]] = field(default_factory=dict)
    hashes: Hashes = field(default_factory=dict)

    def note_logits(self, name: str, position: int, row: np.ndarray) -> None:
        assert (name, position) not in self.hashes, "a position is sampled once, replayed or not"
        self.hashes[name, position] = hashlib.sha256(row.tobytes()).hexdigest()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def random_adjustments(rng: random.Random, max_tokens: int) -> dict[str, Any]:
    """Parameters whose effect depends on the tokens before, which preemption must not lose; few
    ids are allowed, so that they come up again and again."""
    ids = tuple(rng.sample(range(NUM_TOKENS), 12))
    return {
        "allowed_token_ids": rng.choice([None, ids]),
        "presence_penalty": rng.choice([0.0, 1.5]),
        "frequency_penalty": rng.choice([0.1, -0.05]),
        "repetition_penalty": rng.choice([1.0, 1.2]),
        "logit_bias": tuple((token_id, rng.uniform(-1, 1)) for token_id in ids),
        "bad_words": rng.choice([(), ((ids[0], ids[1]), (ids[2],))]),
        "min_tokens": rng.randint(0, max_tokens),
    }


def random_requests(rng: random.Random, count: int) -> list[Request]:
    """Prompts around the 64-token grid, half of them sampled, up to 180 tokens of output."""
    requests = []
    for i in range(count):
        near = rng.choice([1, 20, 63, 64, 65, 100, 128])
        length = max(1, near + rng.randint(-3, 3))
        greedy = rng.random() < 0.5
        max_tokens = rng.choice([1, 20, 150, 180])
        params = SamplingParams(
            temperature=0.0 if greedy else 1.0,
            top_p=rng.choice([1.0, 0.9]),
            top_k=rng.choice([0, 40]),
            seed=rng.getrandbits(64),
            max_tokens=max_tokens,
            ignore_eos=max_tokens > 20,  # so that the blocks wanted do not depend on the weights
            **(random_adjustments(rng, max_tokens) if i % 2 else {}),
        )
        prompt = tuple(rng.randrange(NUM_TOKENS) for _ in range(length))
        requests.append(Request(str(i), prompt, params))
    return requests


def run_alone(directory: Path, requests: list[Request]) -> Run:
    run = Run()
    engine = LLMEngine(engine_config(directory, max_num_seqs=1), logits_hook=run.note_logits)
    for request in requests:
        engine.add_request(request.name, request.prompt, request.params)
        run.ids[request.name] = token_ids(run_to_end(engine)[request.name])
    engine.close()
    return run


def run_together(
    engine: LLMEngine, run: Run, requests: list[Request], rng: random.Random
) -> tuple[set[str], int]:
    """Random arrivals and aborts; the names that ended by themselves, and the preemptions."""
    waiting = list(requests)
    ended: set[str] = set()
    while waiting or engine.has_work:
        while waiting and rng.random() < 0.3:
            request = waiting.pop()
            run.ids[request.name] = []
            engine.add_request(request.name, request.prompt, request.params)
        for output in engine.step():
            run.ids[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                ended.add(output.request_id)
        if rng.random() < 0.006 and engine.open_sequences:
            engine.abort(rng.choice(engine.open_sequences).request_id)
    return ended, engine.stats().num_preemptions


def crowded_config(directory: Path, rng: random.Random) -> EngineConfig:
    """As few blocks as the largest request needs, so that running sequences collide."""
    return engine_config(
        directory,
        num_blocks=rng.choice([5, 6]),
        max_model_len=320,
        max_num_seqs=rng.choice([3, 4, 6]),
        max_num_batched_tokens=rng.choice([64, 128, 256]),
        prefill_chunk=64,
    )


@pytest.mark.parametrize("seed", [1, 10, 13])
def test_tokens_and_logits_are_those_of_the_request_alone(directory: Path, seed: int) -> None:
    rng = random.Random(seed)
    requests = random_requests(rng, 12)
    alone, together = run_alone(directory, requests), Run()
    engine = LLMEngine(
        crowded_config(directory, rng),
        logits_hook=together.note_logits,
        device=DelayingDevice() if seed % 2 else None,
    )
    ended, num_preemptions = run_together(engine, together, requests, rng)
    assert_idle(engine)
    engine.close()

    assert num_preemptions > 0
    assert len(ended) >= 6
    for request in requests:
        name = request.name
        ids = together.ids[name]
        whole = alone.ids[name]
        assert ids == (whole if name in ended else whole[: len(ids)])
        rows = range(len(request.prompt), len(request.prompt) + len(ids))
        assert [together.hashes[name, p] for p in rows] == [alone.hashes[name, p] for p in rows]
    # logits of the token issued beyond the end are equal too, where both runs have them
    common = together.hashes.keys() & alone.hashes.keys()
    assert all(together.hashes[key] == alone.hashes[key] for key in common)


def test_no_block_size_changes_a_bit(directory: Path) -> None:
    """All that EngineConfig allows; contexts before and behind the end of most blocks."""
    rng = random.Random(5)
    requests = [
        Request(
            str(length),
            tuple(rng.randrange(NUM_TOKENS) for _ in range(length)),
            SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True),
        )
        for length in (60, 200, 700)
    ]
    runs = []
    for block_size in range(64, 1025, 64):
        run = Run()
        engine = LLMEngine(
            engine_config(directory, block_size=block_size), logits_hook=run.note_logits
        )
        for request in requests:
            engine.add_request(request.name, request.prompt, request.params)
        run.ids = {name: token_ids(outputs) for name, outputs in run_to_end(engine).items()}
        engine.close()
        runs.append(run)
    assert all(run == runs[0] for run in runs)
