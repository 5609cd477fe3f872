"""The whole product, `deltaserve serve` on the demo model over real sockets: text, disconnects."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from .server_process import ROOT, ServerProcess, wait_until

MODEL = "models/demo"
PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Four sequences at once and too few blocks for four long ones, so that some are preempted."""
    arguments = ["--port=0", "--max-num-seqs=4", "--max-model-len=384", "--kv-cache-memory=3500K"]
    started = ServerProcess(
        ["deltaserve.server.cli", "serve", "--model-path", MODEL, *arguments],
        tmp_path_factory.mktemp("model"),
    )
    yield started.wait_ready()
    started.stop()


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def test_the_demo_model_answers(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt=PROMPT, max_tokens=2, temperature=0)
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.usage is not None and answer.usage.prompt_tokens == 5


def test_a_stream_is_the_whole_answer_in_pieces(client: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 40, "seed": 5}
    whole = client.completions.create(**fields)
    chunks = list(client.completions.create(**fields, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason
    assert len(chunks) > 1


def test_text_and_its_tokens_get_the_same_answer(client: openai.OpenAI) -> None:
    from deltaserve.engine.tokenizer import Tokenizer

    prompt_ids = Tokenizer(ROOT / MODEL).encode(PROMPT)
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 8, "temperature": 0, "logprobs": 2}
    text = client.completions.create(prompt=PROMPT, **fields).choices[0]
    tokens = client.completions.create(prompt=prompt_ids, **fields).choices[0]
    assert text == tokens
    assert text.logprobs is not None and text.logprobs.tokens is not None
    assert "".join(text.logprobs.tokens) == text.text


def test_a_batch_is_its_prompts_one_by_one(client: openai.OpenAI) -> None:
    prompts = ["Once upon a time", PROMPT, "Q:", "The", "A", "She said"]
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "seed": 3}
    batch = client.completions.create(prompt=prompts, **fields)
    alone = [client.completions.create(prompt=p, **fields).choices[0].text for p in prompts]
    assert [choice.text for choice in batch.choices] == alone


def test_a_prompt_seen_before_is_found_and_answered_the_same(
    server: ServerProcess, client: openai.OpenAI
) -> None:
    prompt = [random.Random(1).randrange(300) for _ in range(200)]
    fields: dict[str, Any] = {"model": MODEL, "max_tokens": 6, "temperature": 0, "logprobs": 3}

    def ask(salt: str, **more: Any) -> openai.types.Completion:
        return client.completions.create(
            prompt=prompt, **fields, **more, extra_body={"cache_salt": salt}
        )

    def cached(answer: openai.types.Completion) -> int:
        assert answer.usage is not None
        details = answer.usage.prompt_tokens_details
        return 0 if details is None else details.cached_tokens or 0

    def hits() -> float:
        (line,) = (
            line
            for line in httpx.get(server.url + "/metrics").text.splitlines()
            if line.startswith("vllm:prefix_cache_hits_total")
        )
        return float(line.split()[-1])

    before = hits()
    first, second, other = ask("a"), ask("a"), ask("b")
    assert [cached(answer) for answer in (first, second, other)] == [0, 128, 0]
    assert first.choices == second.choices == other.choices
    assert hits() == before + 128
    assert [choice.text for choice in ask("c", n=3).choices] == [first.choices[0].text] * 3
    assert hits() == before + 3 * 128, "two of three choices find what the first one computed"


def test_a_prompt_over_the_context_is_refused_with_the_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[5] * 360, max_tokens=25)
    for number in ("360", "25", "385", "384"):
        assert number in caught.value.message


async def visit(
    client: httpx.AsyncClient, prompt: list[int], max_tokens: int, stay: int | None, stream: bool
) -> str | None:
    """Reads `stay` events, or leaves at once when a whole answer was asked for, or with None stays
    to the end and returns the answer."""
    fields = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "seed": 1,
        "stream": stream,
    }
    if not stream:
        asking = asyncio.create_task(client.post("/v1/completions", json=fields))
        if stay is not None:
            for _ in range(stay):
                await client.get("/health")  # lets the other side get on
            asking.cancel()
            return None
        response = await asking
        text: str = response.json()["choices"][0]["text"]
        return text
    async with client.stream("POST", "/v1/completions", json=fields) as response:
        lines = response.aiter_lines()
        seen = 0
        while stay is None or seen < stay:
            line = await anext(lines, None)
            if line is None:
                break
            seen += bool(line)
    return None


async def test_clients_that_leave_in_every_state_leave_nothing_behind(
    server: ServerProcess,
) -> None:
    """Queued, in prefill, decoding, preempted, streaming or not; those who stay get what they
    would have got alone."""
    rng = random.Random(7)
    prompts = [[5 + n] * 60 for n in range(4)]  # together they outgrow the blocks
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        alone = [await visit(client, prompt, 80, None, False) for prompt in prompts]
        staying = [visit(client, prompt, 80, None, False) for prompt in prompts]
        leaving = [
            visit(
                client,
                [rng.randrange(5, 500)] * rng.choice((1, 60, 200)),
                100,
                rng.choice((0, 1, 3, 10)),
                rng.random() < 0.6,
            )
            for _ in range(14)
        ]
        together = await asyncio.gather(*staying, *leaving)
    assert together == [*alone, *[None] * 14]
    wait_until("nothing left", server.is_idle)
    values = server.metrics()
    assert values["vllm:num_preemptions_total"] > 0
    assert values["vllm:request_success_total:error"] == 0
    assert "Traceback" not in server.log()


def test_sigterm_ends_the_product_cleanly(tmp_path: Path) -> None:
    import signal

    server = ServerProcess(
        ["deltaserve.server.cli", "serve", "--model-path", MODEL, "--port=0"], tmp_path
    )
    engine_pid = server.engine_pid
    server.signal(signal.SIGTERM)  # while it loads
    try:
        assert server.wait() == 0
    finally:
        server.stop()
    wait_until("engine gone", lambda: not Path(f"/proc/{engine_pid}").exists())
    assert "Traceback" not in server.log()
    assert list(server.temporary.iterdir()) == []
