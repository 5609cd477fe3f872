"""What each parameter of /v1/completions does, over sockets, on a model whose logits are a table.

    a -> b 5, z 4        e -> end 5, f 4        s -> half of a snowman and so on, 5
    b -> c 5, z 4        f -> end 5, e 4
    c -> a 5, z 4        z -> z 5, a 4.5, end 4.4
    end -> a 5

The checkpoint's generation_config.json says top_k 1, so that all is greedy where nothing is said.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from .bigram_model import logits_table, write_bigram_model
from .server_process import ServerProcess, wait_until
from .tiny_checkpoint import ENDOFTEXT_ID, IM_END_ID, NUM_TOKENS

A, B, C, E, F, S, Z = b"abcefsz"
SNOWMAN = "\u2603".encode()
TABLE: dict[int, dict[int, float]] = {
    A: {B: 5, Z: 4},
    B: {C: 5, Z: 4},
    C: {A: 5, Z: 4},
    E: {IM_END_ID: 5, F: 4},
    F: {IM_END_ID: 5, E: 4},
    Z: {Z: 5, A: 4.5, IM_END_ID: 4.4},
    IM_END_ID: {A: 5},
    ENDOFTEXT_ID: {A: 5},
    S: {SNOWMAN[0]: 5},
    SNOWMAN[0]: {SNOWMAN[1]: 5},
    SNOWMAN[1]: {SNOWMAN[2]: 5},
    SNOWMAN[2]: {S: 5},
}
LOGITS = logits_table(TABLE)[:, :NUM_TOKENS]
LOGPROBS = LOGITS - np.log(np.exp(LOGITS).sum(axis=1, keepdims=True))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    directory = tmp_path_factory.mktemp("parameters")
    write_bigram_model(directory / "model", TABLE, {"top_k": 1, "eos_token_id": [ENDOFTEXT_ID]})
    arguments = ["--served-model-name=m", "--port=0", "--max-num-seqs=2", "--max-model-len=256"]
    started = ServerProcess(
        ["deltaserve.server.cli", "serve", "--model-path", str(directory / "model"), *arguments],
        directory,
    )
    yield started.wait_ready()
    started.stop()


def complete(server: ServerProcess, prompt: Any, **fields: Any) -> dict[str, Any]:
    response = server.complete(model="m", prompt=prompt, **fields)
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    return body


def answer(server: ServerProcess, prompt: Any, **fields: Any) -> tuple[str, str, Any]:
    """(text, finish_reason, stop_reason) of the one choice."""
    (choice,) = complete(server, prompt, **fields)["choices"]
    return choice["text"], choice["finish_reason"], choice["stop_reason"]


def stream(server: ServerProcess, prompt: Any, **fields: Any) -> list[dict[str, Any]]:
    response = server.complete(model="m", prompt=prompt, stream=True, **fields)
    assert response.status_code == 200, response.text
    parts = response.text.split("\n\n")
    assert parts[-2:] == ["data: [DONE]", ""]
    return [json.loads(part.removeprefix("data: ")) for part in parts[:-2]]


ENDED = ("stop", IM_END_ID)
CUT = ("length", None)

EFFECTS: list[tuple[str, str, dict[str, Any], tuple[str, str, Any]]] = [
    ("greedy by the checkpoint's default", "a", {"max_tokens": 5}, ("bcabc", *CUT)),
    ("both end ids", "e", {}, ("", *ENDED)),
    ("ignore_eos", "e", {"ignore_eos": True, "max_tokens": 4}, ("abc", *CUT)),
    (
        "skip_special_tokens",
        "e",
        {"ignore_eos": True, "skip_special_tokens": False, "max_tokens": 3},
        ("<|im_end|>ab", *CUT),
    ),
    # c, a, b are in the output when b comes up again: 5 - 2 < 4; then the end is the likeliest
    ("presence_penalty", "a", {"presence_penalty": 2}, ("bcaz", *ENDED)),
    # the third b has 5 - 2 * 0.7 < 4
    ("frequency_penalty", "a", {"frequency_penalty": 0.7}, ("bcabcaz", *ENDED)),
    ("negative presence", "z", {"presence_penalty": -2, "max_tokens": 3}, ("zzz", *CUT)),
    # the prompt counts: a has 5 / 1.3 < 4 at its first turn
    ("repetition_penalty", "a", {"repetition_penalty": 1.3}, ("bcz", *ENDED)),
    ("logit_bias", "a", {"logit_bias": {str(Z): 2}, "max_tokens": 3}, ("zzz", *CUT)),
    ("logit_bias of -100", "a", {"logit_bias": {"98": -100}, "max_tokens": 2}, ("zz", *CUT)),
    ("allowed_token_ids", "a", {"allowed_token_ids": [Z, A], "max_tokens": 3}, ("zzz", *CUT)),
    ("bad_words of one token", "a", {"bad_words": ["b", "z"], "max_tokens": 1}, ("\x00", *CUT)),
    ("min_tokens", "e", {"min_tokens": 3}, ("fef", *ENDED)),
    ("min_tokens, stop ids", "a", {"min_tokens": 3, "stop_token_ids": [C]}, ("bzzzzz", *CUT)),
    ("min_tokens, stop strings", "a", {"min_tokens": 3, "stop": "c"}, ("bcab", "stop", "c")),
    ("stop_token_ids", "a", {"stop_token_ids": [A, C]}, ("b", "stop", C)),
    (
        "stop_token_ids in the output",
        "a",
        {"stop_token_ids": [C], "include_stop_str_in_output": True},
        ("bc", "stop", C),
    ),
    (
        "stop_token_ids with ignore_eos",
        "e",
        {"stop_token_ids": [B], "ignore_eos": True},
        ("a", "stop", B),
    ),
    ("stop", "a", {"stop": ["ca", "cab"]}, ("b", "stop", "ca")),
    ("stop on the last token", "a", {"stop": "ca", "max_tokens": 3}, ("b", "stop", "ca")),
    (
        "include_stop_str_in_output",
        "a",
        {"stop": "ca", "include_stop_str_in_output": True},
        ("bca", "stop", "ca"),
    ),
    ("the end id is shown if all is", "e", {"include_stop_str_in_output": True}, ("", *ENDED)),
    (
        "end id, shown",
        "e",
        {"include_stop_str_in_output": True, "skip_special_tokens": False},
        ("<|im_end|>", *ENDED),
    ),
    ("a character over three tokens", "s", {"max_tokens": 4}, ("\u2603s", *CUT)),
    ("a character cut short", "s", {"max_tokens": 2}, ("\ufffd", *CUT)),
    ("top_k of the request", "a", {"top_k": 0, "temperature": 0, "max_tokens": 2}, ("bc", *CUT)),
]


@pytest.mark.parametrize(
    ("prompt", "fields", "expected"), [e[1:] for e in EFFECTS], ids=[e[0] for e in EFFECTS]
)
def test_effect(
    server: ServerProcess, prompt: str, fields: dict[str, Any], expected: tuple[str, str, Any]
) -> None:
    fields = {"max_tokens": 6 if "min_tokens" in fields else 30} | fields
    assert answer(server, prompt, **fields) == expected
    chunks = [chunk["choices"][0] for chunk in stream(server, prompt, **fields)]
    assert "".join(chunk["text"] for chunk in chunks) == expected[0]
    assert (chunks[-1]["finish_reason"], chunks[-1]["stop_reason"]) == expected[1:]
    assert {chunk["finish_reason"] for chunk in chunks[:-1]} <= {None}


def seconds(server: ServerProcess, **fields: Any) -> set[str]:
    """First tokens after an "a" that 40 seeds draw."""
    choices = complete(
        server, "a", max_tokens=1, n=40, seed=1, **({"top_k": 0, "temperature": 1} | fields)
    )
    return {choice["text"] for choice in choices["choices"]}


@pytest.mark.parametrize(
    ("fields", "drawn"),
    [
        ({}, {"b", "z"}),  # z has 0.27
        ({"top_k": 1}, {"b"}),
        ({"top_k": 2}, {"b", "z"}),
        ({"top_p": 0.7}, {"b"}),
        ({"top_p": 0.8}, {"b", "z"}),
        ({"min_p": 0.3}, {"b", "z"}),  # z is 0.37 as likely as b
        ({"min_p": 0.4}, {"b"}),
        ({"temperature": 0.05}, {"b"}),
        ({"allowed_token_ids": [Z]}, {"z"}),
        ({"logit_bias": {str(Z): 20}}, {"z"}),
    ],
    ids=str,
)
def test_what_can_be_drawn(server: ServerProcess, fields: dict[str, Any], drawn: set[str]) -> None:
    assert seconds(server, **fields) == drawn


def test_n_choices_have_seeds_counting_up_and_indices_by_prompt(server: ServerProcess) -> None:
    fields: dict[str, Any] = {"max_tokens": 5, "top_k": 0, "temperature": 2.0}
    body = complete(server, ["a", "bb"], n=3, best_of=3, seed=2**64 - 2, **fields)
    assert [choice["index"] for choice in body["choices"]] == [*range(6)]
    alone = [
        answer(server, prompt, seed=seed, **fields)[0]
        for prompt in ("a", "bb")
        for seed in (2**64 - 2, 2**64 - 1, 0)
    ]
    assert [choice["text"] for choice in body["choices"]] == alone
    assert len(set(alone)) > 2
    outputs = body["usage"]["completion_tokens"]
    assert body["usage"] == {
        "prompt_tokens": 3,
        "completion_tokens": outputs,
        "total_tokens": 3 + outputs,
    }
    texts = dict.fromkeys(range(6), "")
    for chunk in stream(server, ["a", "bb"], n=3, seed=2**64 - 2, **fields):
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["text"]
    assert [*texts.values()] == alone


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


def test_priority(server: ServerProcess) -> None:
    """Two requests keep the two places; of two that wait, the one of lower value goes first."""
    done: list[str] = []

    def run(name: str, **fields: Any) -> None:
        complete(server, "a", **fields)
        done.append(name)

    def waiting(count: int) -> None:
        wait_until(f"{count} wait", lambda: server.metrics()["vllm:num_requests_waiting"] == count)

    hold = {"model": "m", "prompt": "a", "max_tokens": 250, "stream": True}
    with ThreadPoolExecutor(2) as pool:
        with (
            server.client.stream("POST", "/v1/completions", json=hold),
            server.client.stream("POST", "/v1/completions", json=hold),
        ):
            late = pool.submit(run, "late", priority=1, max_tokens=200)
            waiting(1)
            soon = pool.submit(run, "soon", priority=0, max_tokens=1)
            waiting(2)
        late.result()
        soon.result()
    assert done == ["soon", "late"]


def test_a_context_that_is_full_to_the_last_token(server: ServerProcess) -> None:
    assert complete(server, [A] * 250, max_tokens=6)["usage"]["total_tokens"] == 256
    for max_tokens in (7, 300):
        response = server.complete(model="m", prompt=[A] * 250, max_tokens=max_tokens)
        assert response.status_code == 400
        message = response.json()["error"]["message"]
        for number in (250, max_tokens, 250 + max_tokens, 256):
            assert str(number) in message
    echoed = complete(server, [A] * 256, max_tokens=0, echo=True)
    assert echoed["choices"][0]["text"] == "a" * 256
    assert server.complete(model="m", prompt=[A] * 257, max_tokens=0, echo=True).status_code == 400


UNPROCESSABLE: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens: must be between 1 and"),
    ({"max_tokens": -1}, "max_tokens: must be between 1 and"),
    ({"max_tokens": 10**40}, "max_tokens: must be between 1 and"),
    ({"max_tokens": 4, "min_tokens": 5}, "min_tokens: must be at most max_tokens (4), got 5"),
    ({"temperature": -0.1}, "temperature: must be in"),
    ({"top_p": 0}, "top_p: must be in"),
    ({"top_k": -2}, "top_k: must be between"),
    ({"min_p": 2}, "min_p: must be in"),
    ({"presence_penalty": 2.1}, "presence_penalty: must be in"),
    ({"frequency_penalty": -2.1}, "frequency_penalty: must be in"),
    ({"repetition_penalty": 0}, "repetition_penalty: must be in"),
    ({"seed": 2**64}, "seed: must be between"),
    ({"logprobs": 21}, "logprobs: must be between 0 and 20"),
    ({"prompt_logprobs": -1}, "prompt_logprobs: must be between 0 and 20"),
    ({"stop": [str(n) for n in range(17)]}, "stop: at most 16"),
    ({"stop": [""]}, "stop: every stop must be a non-empty string"),
    ({"stop": "x" * 1025}, "stop: a string may have at most 1024 characters"),
    ({"stop_token_ids": [NUM_TOKENS]}, "stop_token_ids: the model's token ids are 0 to 270"),
    ({"stop_token_ids": [1] * 129}, "stop_token_ids: at most 128 ids"),
    ({"logit_bias": {"-1": 1}}, "logit_bias: must be between 0 and"),
    ({"logit_bias": {"1": 101}}, "logit_bias: must be in"),
    ({"logit_bias": {str(NUM_TOKENS): 1}}, "logit_bias: the model's token ids are 0 to 270"),
    ({"allowed_token_ids": []}, "allowed_token_ids: must not be empty"),
    ({"allowed_token_ids": [2**31]}, "allowed_token_ids: must be between 0 and"),
    ({"bad_words": [" "]}, "bad_words: every word must hold more than spaces"),
    ({"bad_words": ["x" * 17]}, "bad_words: at most 16 ids a sequence"),
    ({"bad_words": ["x"] * 65}, "bad_words: at most 64 words, got 65"),
    ({"cache_salt": ""}, "cache_salt: must not be empty"),
    ({"priority": 2**31}, "priority: must be between"),
    ({"n": 0}, "n: must be between 1 and 128"),
    ({"best_of": 2}, "best_of: must equal n"),
]


@pytest.mark.parametrize(("fields", "message"), UNPROCESSABLE, ids=lambda v: str(v)[:40])
def test_a_value_out_of_range_is_named(
    server: ServerProcess, fields: dict[str, Any], message: str
) -> None:
    response = server.complete(model="m", prompt="a", **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"].startswith(message)
    assert error["param"] == message.partition(":")[0]


def test_nothing_is_left_behind(server: ServerProcess) -> None:
    """Blocks and slots, after all of the above."""
    wait_until("idle", server.is_idle)
