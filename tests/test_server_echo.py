"""What answers show beside the text: echo, log-probabilities, token ids, usage; over sockets, on a
model whose logits are a table (`bigram_server`)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from .bigram_server import (
    LOGPROBS,
    SNOWMAN,
    A,
    B,
    C,
    E,
    S,
    Z,
    answer,
    complete,
    start_bigram,
    stream,
)
from .server_process import ServerProcess
from .tiny_checkpoint import IM_END_ID, NUM_TOKENS


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    started = start_bigram(tmp_path_factory.mktemp("parameters"))
    yield started
    started.stop()


def test_logprobs_are_of_the_raw_logits(server: ServerProcess) -> None:
    fields: dict[str, Any] = {"max_tokens": 2, "logprobs": 2, "logit_bias": {str(Z): 2}}
    body = complete(server, "a", temperature=0.5, presence_penalty=1, **fields)
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["z", "z"]
    assert logprobs["token_logprobs"] == pytest.approx([LOGPROBS[A, Z], LOGPROBS[Z, Z]], abs=1e-5)
    assert list(logprobs["top_logprobs"][0]) == ["b", "z"]
    assert logprobs["top_logprobs"][1] == pytest.approx(
        {"z": LOGPROBS[Z, Z], "a": LOGPROBS[Z, A]}, abs=1e-5
    )


def prompt_entry(before: int, token: int, num_top: int) -> dict[str, float]:
    """The likeliest and the token itself, by text."""
    order = np.lexsort((np.arange(NUM_TOKENS), -LOGPROBS[before]))[:num_top]
    return {chr(id_): LOGPROBS[before, id_] for id_ in (*order, token)}


@pytest.mark.parametrize("prompt", ["abz", [A, B, Z]], ids=["text", "ids"])
@pytest.mark.parametrize("max_tokens", [0, 1, 3])
def test_echo_with_logprobs(server: ServerProcess, prompt: Any, max_tokens: int) -> None:
    """What an evaluation harness sums up: of each prompt token but the first, exactly."""
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "max_tokens": max_tokens}
    output = "zzz"[:max_tokens]
    body = complete(server, prompt, **fields)
    (choice,) = body["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abz" + output, "length")
    assert body["usage"]["completion_tokens"] == max_tokens
    chunks = stream(server, prompt, **fields)
    streamed: dict[str, list[Any]] = {name: [] for name in choice["logprobs"]}
    for chunk in chunks:
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            streamed[name] += values
    assert streamed == choice["logprobs"]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]

    logprobs = choice["logprobs"]
    ids = [A, B, Z, *output.encode()]
    pairs = list(itertools.pairwise(ids))
    assert logprobs["tokens"] == [chr(id_) for id_ in ids]
    assert logprobs["text_offset"] == [*range(len(ids))]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == pytest.approx(
        [LOGPROBS[pair] for pair in pairs], abs=1e-5
    )
    for pair, top in zip(pairs, logprobs["top_logprobs"][1:], strict=True):
        assert top == pytest.approx(prompt_entry(*pair, 1), abs=1e-5)


@pytest.mark.parametrize("max_tokens", [0, 2])
def test_echo_alone(server: ServerProcess, max_tokens: int) -> None:
    fields: dict[str, Any] = {"echo": True, "max_tokens": max_tokens, "n": 2}
    prompts = ["<|im_end|>\u2603a", "b"]
    expected = ["<|im_end|>\u2603abc"[: max_tokens + 12], "bca"[: max_tokens + 1]]
    body = complete(server, prompts, **fields)
    texts = [choice["text"] for choice in body["choices"]]
    assert texts == [expected[0]] * 2 + [expected[1]] * 2
    assert [choice["logprobs"] for choice in body["choices"]] == [None] * 4
    assert body["usage"]["completion_tokens"] == 4 * max_tokens
    streamed = [""] * 4
    for chunk in stream(server, prompts, **fields):
        streamed[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert streamed == texts


def test_every_choice_has_the_log_probabilities_of_its_prompt(server: ServerProcess) -> None:
    """They are computed once a prompt."""
    fields: dict[str, Any] = {"echo": True, "logprobs": 1, "prompt_logprobs": 2, "n": 3}
    body = complete(server, ["ab", "za"], **fields, max_tokens=4)
    alone = [complete(server, p, **fields | {"n": 1}, max_tokens=4) for p in ("ab", "za")]
    for choice in body["choices"]:
        (same,) = alone[choice["index"] // 3]["choices"]
        assert choice == same | {"index": choice["index"]}
    streamed: dict[int, list[Any]] = {}
    for chunk in stream(server, ["ab", "za"], **fields, max_tokens=4):
        (choice,) = chunk["choices"]
        streamed.setdefault(choice["index"], []).append(choice)
    for choice in body["choices"]:
        parts = streamed[choice["index"]]
        assert parts[0]["prompt_logprobs"] == choice["prompt_logprobs"]
        assert "".join(part["text"] for part in parts) == choice["text"]
        tokens = [token for part in parts for token in part["logprobs"]["tokens"]]
        assert tokens == choice["logprobs"]["tokens"]


def test_echo_of_characters_has_right_offsets(server: ServerProcess) -> None:
    body = complete(server, "\u2603s", echo=True, logprobs=0, max_tokens=4)
    logprobs = body["choices"][0]["logprobs"]
    assert body["choices"][0]["text"] == "\u2603s\u2603s"
    assert logprobs["text_offset"] == [0, 0, 0, 1, 2, 2, 2, 3]
    assert logprobs["tokens"][:4] == ["bytes:\\xe2", "bytes:\\x98", "bytes:\\x83", "s"]


def test_a_prompt_that_ends_inside_a_character_leaks_nothing(server: ServerProcess) -> None:
    """The output's two bytes end a character that the prompt began; they are none by themselves."""
    assert answer(server, [S, SNOWMAN[0]], max_tokens=3)[0] == "\ufffd\ufffds"
    echoed = answer(server, [S, SNOWMAN[0]], max_tokens=3, echo=True)[0]
    assert echoed == "s\ufffd" + "\ufffd\ufffds"


def test_prompt_logprobs(server: ServerProcess) -> None:
    def entry(before: int, token: int, rank: int | None) -> dict[str, Any]:
        return {
            "logprob": pytest.approx(LOGPROBS[before, token], abs=1e-5),
            "rank": rank,
            "decoded_token": chr(token),
        }

    expected = [
        None,
        {str(B): entry(A, B, 1)},
        {str(Z): entry(B, Z, 2), str(C): entry(B, C, 1)},
    ]
    for max_tokens in (0, 2):
        body = complete(server, "abz", prompt_logprobs=1, max_tokens=max_tokens)
        assert body["choices"][0]["prompt_logprobs"] == expected
        assert body["choices"][0]["text"] == "zz"[:max_tokens]
        assert body["choices"][0]["logprobs"] is None
    chunks = stream(server, "abz", prompt_logprobs=1, max_tokens=3)
    assert chunks[0]["choices"][0]["prompt_logprobs"] == expected
    assert not any("prompt_logprobs" in chunk["choices"][0] for chunk in chunks[1:])


def test_return_token_ids(server: ServerProcess) -> None:
    fields: dict[str, Any] = {"max_tokens": 5, "return_token_ids": True}
    (choice,) = complete(server, "ae", **fields)["choices"]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == ([A, E], [IM_END_ID])
    chunks = [chunk["choices"][0] for chunk in stream(server, "sa", **fields)]
    assert chunks[0]["prompt_token_ids"] == [S, A]
    assert not any("prompt_token_ids" in chunk for chunk in chunks[1:])
    assert [id_ for chunk in chunks for id_ in chunk["token_ids"]] == [B, C, A, B, C]
    (plain,) = complete(server, "a", max_tokens=1)["choices"]
    assert not {"token_ids", "prompt_token_ids", "prompt_logprobs"} & set(plain)


def test_continuous_usage(server: ServerProcess) -> None:
    options = {"continuous_usage_stats": True, "include_usage": True}
    chunks = stream(server, "aa", max_tokens=5, stream_options=options)
    usages = [chunk["usage"] for chunk in chunks]
    counts = [usage["completion_tokens"] for usage in usages]
    assert counts == sorted(counts) and counts[-2:] == [5, 5] and counts[0] >= 1
    assert {usage["prompt_tokens"] for usage in usages} == {2}
    assert all(u["total_tokens"] == 2 + u["completion_tokens"] for u in usages)
    without_last = stream(
        server, "aa", max_tokens=5, stream_options={"continuous_usage_stats": True}
    )
    assert all(chunk["choices"] for chunk in without_last)
    assert without_last[-1]["usage"]["completion_tokens"] == 5
