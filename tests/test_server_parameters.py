"""What each parameter of /v1/completions does to the text, over sockets, on a model whose logits
are a table (`bigram_server`)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from .bigram_server import A, B, C, Z, answer, complete, start_bigram, stream
from .server_process import ServerProcess, wait_until
from .tiny_checkpoint import IM_END_ID, NUM_TOKENS


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    started = start_bigram(tmp_path_factory.mktemp("parameters"))
    yield started
    started.stop()


SEVENTEEN = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 17}}}
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
    ("bad_words", "a", {"bad_words": ["bc"], "max_tokens": 3}, ("bzz", *CUT)),
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


def test_cache_salt(server: ServerProcess) -> None:
    """A prompt is found again only under the salt that it had."""
    usages = [
        complete(server, [B] * 200, max_tokens=1, cache_salt=salt)["usage"]
        for salt in (None, None, "one", "one", "two")
    ]
    details = [usage.get("prompt_tokens_details") for usage in usages]
    found = {"cached_tokens": 128}
    assert details == [None, found, None, found, None]
    assert {usage["prompt_tokens"] for usage in usages} == {200}


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
    ({"n": 100, "allowed_token_ids": [1] * 11_000}, "allowed_token_ids: 1100000 over all choices"),
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


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"allowed_token_ids": [Z], "bad_words": ["z"]}, ""),
        ({"allowed_token_ids": [IM_END_ID], "min_tokens": 2}, ""),
        ({"guided_regex": "[bz]", "bad_words": ["z", "b"]}, ""),
        ({"guided_regex": "ab", "min_tokens": 3}, "ab"),
        ({"structured_outputs": {"choice": ["zc"]}, "allowed_token_ids": [Z]}, "z"),
        ({"response_format": SEVENTEEN, "min_tokens": 9}, "17"),
    ],
    ids=lambda value: "-".join(value),
)
def test_parameters_that_leave_no_token_are_the_senders_error(
    server: ServerProcess, fields: dict[str, Any], shown: str
) -> None:
    """At once, or after what a stream has shown by then."""
    param, other = fields
    response = server.complete(model="m", prompt="a", **fields)
    assert response.status_code == 400
    error = response.json()["error"]
    message = f"{param}: leaves no token that may be sampled, together with {other}"
    assert (error["message"], error["param"]) == (message, param)
    *chunks, last = stream(server, "a", **fields)
    assert last == {"error": error}
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == shown


def test_finished_reasons_are_those_of_the_answers(server: ServerProcess) -> None:
    """Also where the engine ends at max_tokens and the text at a stop string."""

    def counts() -> dict[str, float]:
        values = server.metrics()
        return {r: values[f"vllm:request_success_total:{r}"] for r in ("stop", "length", "abort")}

    wait_until("idle", server.is_idle)
    before = counts()
    for streaming in (False, True):
        for fields in (
            {"stop": "ca", "max_tokens": 3},
            {"stop": "ca", "max_tokens": 30},
            {"stop": "x", "max_tokens": 3},
            {"stop": "x", "max_tokens": 3, "n": 2},
            {"max_tokens": 3},
        ):
            response = server.complete(model="m", prompt="a", stream=streaming, **fields)
            assert response.status_code == 200
    after = {"stop": before["stop"] + 4, "length": before["length"] + 8, "abort": before["abort"]}
    wait_until("counted", lambda: counts() == after)


def test_nothing_is_left_behind(server: ServerProcess) -> None:
    """Blocks and slots, after all of the above."""
    wait_until("idle", server.is_idle)
