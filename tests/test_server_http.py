"""Routes, errors, headers and the log over real sockets and a ScriptedEngine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .server_process import ServerProcess, start_scripted, wait_until

PROMPT = [50, 60]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    started = start_scripted(tmp_path_factory.mktemp("http"), max_queue=8)
    yield started.wait_ready()
    started.stop()


REFUSALS: list[tuple[str, dict[str, Any], int, str | None, str]] = [
    ("unknown model", {"model": "gpt"}, 404, "model", "the model 'gpt' does not exist"),
    ("unknown field", {"foo": 1}, 400, "foo", "unknown field 'foo'"),
    ("refused field", {"suffix": "x"}, 400, "suffix", "suffix: not supported by this server"),
    ("too many choices", {"prompt": [[5]] * 9, "n": 128}, 400, "n", "9 prompts of 128 choices"),
    ("context", {"max_tokens": 600}, 400, "prompt", "602 tokens, limit 512"),
    ("long text", {"prompt": "a" * 60_000}, 400, "prompt", "60000 characters, more than"),
    ("id too high", {"prompt": [256]}, 400, "prompt", "token id 256 is not in 0 .. 255"),
    ("id negative", {"prompt": [[5], [-1]]}, 400, "prompt", "token id -1 is not in 0 .. 255"),
    ("id huge", {"prompt": [2**70]}, 400, "prompt", f"token id {2**70} is not in"),
    ("batch over the queue", {"prompt": [[5]] * 50}, 429, None, "requests are waiting"),
]


@pytest.mark.parametrize(
    ("fields", "status", "param", "message"),
    [case[1:] for case in REFUSALS],
    ids=[case[0] for case in REFUSALS],
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_refusal_names_the_field_and_leaves_nothing_behind(
    server: ServerProcess,
    fields: dict[str, Any],
    status: int,
    param: str | None,
    message: str,
    stream: bool,
) -> None:
    request = {"model": "scripted", "prompt": PROMPT, "stream": stream} | fields
    response = server.complete(**request)
    assert response.status_code == status
    error = response.json()["error"]
    assert error["param"] == param
    assert message in error["message"]
    assert ("retry-after" in response.headers) == (status == 429)
    wait_until("nothing left", server.is_idle)


@pytest.mark.parametrize(
    ("content", "kind", "status"),
    [
        (b"{", "application/json", 400),
        (b'{"a":NaN}', "application/json", 400),
        (b"[" * 50_000, "application/json; charset=utf-8", 400),
        (b"{}", "text/plain", 415),
        (b"{}", "", 415),
        (b"x" * 100_001, "application/json", 413),
    ],
)
def test_bad_bodies(server: ServerProcess, content: bytes, kind: str, status: int) -> None:
    headers = {"Content-Type": kind} if kind else {}
    response = server.client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


def test_a_chunked_body_is_measured_while_it_comes(server: ServerProcess) -> None:
    parts = (b"x" * 50_000 for _ in range(3))
    response = server.client.post(
        "/v1/completions", content=parts, headers={"Content-Type": "application/json"}
    )
    assert response.status_code == 413


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nope", 404),
        ("GET", "/v1/completions", 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/nope", 404),
        ("GET", "/health/", 404),
        ("DELETE", "/v1/models/scripted", 405),
    ],
)
def test_routes_that_are_not_there(
    server: ServerProcess, method: str, path: str, status: int
) -> None:
    response = server.client.request(method, path)
    assert response.status_code == status
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert ("allow" in response.headers) == (status == 405)


def test_models(server: ServerProcess) -> None:
    listed = server.client.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["scripted", "org/alias"]
    one = server.client.get("/v1/models/org/alias").json()
    assert (one["id"], one["max_model_len"]) == ("org/alias", 512)
    assert server.complete(model="org/alias", prompt="a", max_tokens=1).status_code == 200


def test_small_routes(server: ServerProcess) -> None:
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/ready").status_code == 200
    assert set(server.client.get("/version").json()) == {"version"}


@pytest.mark.parametrize("sent", ["abc-1", None, "with space", "x" * 129])
def test_request_ids_are_taken_or_made(server: ServerProcess, sent: str | None) -> None:
    headers = {} if sent is None else {"X-Request-Id": sent}
    for path in ("/health", "/nope"):
        returned = server.client.get(path, headers=headers).headers["x-request-id"]
        assert (returned == sent) == (sent == "abc-1")
        assert returned


def test_the_log_has_numbers_and_no_text(server: ServerProcess) -> None:
    response = server.complete(model="scripted", prompt="a secret of mine", max_tokens=3)
    line = wait_until(
        "the line",
        lambda: [
            line
            for line in server.log().splitlines()
            if f"id={response.headers['x-request-id']}" in line
        ],
    )[0]
    assert "POST /v1/completions 200" in line
    assert "completion_tokens=3 finish_reason=length" in line
    assert "secret" not in server.log()


def test_a_path_cannot_forge_log_lines(server: ServerProcess) -> None:
    server.client.get("/nope%0AINFO%20forged")
    wait_until("the line", lambda: "forged" in server.log())
    assert not any(line.startswith("INFO forged") for line in server.log().splitlines())
