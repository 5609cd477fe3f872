"""Keys, origins, time-outs, logs, TLS and Unix sockets, each on a server that is set up so."""

from __future__ import annotations

import json
import signal
import ssl
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from .scripted_engine import ENDLESS
from .server_process import ServerProcess, start_scripted, wait_until

KEYS = ["first-key", "second-key"]
ORIGIN = "https://pages.example"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    started = start_scripted(
        tmp_path_factory.mktemp("guarded"),
        api_keys=KEYS,
        cors_origins=[ORIGIN],
        log_format="json",
        request_timeout=1.0,
        step_s=0.01,
        max_model_len=100_000,
    )
    yield started.wait_ready()
    started.stop()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.mark.parametrize("path", ["/health", "/ready", "/version", "/metrics"])
def test_probes_and_scrapers_need_no_key(guarded: ServerProcess, path: str) -> None:
    assert guarded.client.get(path).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/v1/models/scripted"),
        ("POST", "/v1/completions"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/tokenizer_info"),
        ("GET", "/nope"),
        ("GET", "/health/"),
        ("GET", "//health"),
        ("GET", "/metrics%2f..%2fv1"),
    ],
)
def test_everything_else_does(guarded: ServerProcess, method: str, path: str) -> None:
    response = guarded.client.request(method, path)
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": "Bearer"},
        bearer("first-ke"),
        bearer("first-keys"),
        bearer("First-Key"),
        bearer("first-key second-key"),
        {"Authorization": "first-key"},
        {"Authorization": "Basic first-key"},
        {"X-Api-Key": "first-key"},
    ],
    ids=str,
)
def test_wrong_keys(guarded: ServerProcess, headers: dict[str, str]) -> None:
    assert guarded.client.get("/v1/models", headers=headers).status_code == 401


def test_two_authorizations_are_none(guarded: ServerProcess) -> None:
    headers = [("Authorization", f"Bearer {key}") for key in KEYS]
    assert guarded.client.get("/v1/models", headers=headers).status_code == 401


@pytest.mark.parametrize("key", KEYS)
def test_any_of_the_keys_opens(guarded: ServerProcess, key: str) -> None:
    assert guarded.client.get("/v1/models", headers=bearer(key)).status_code == 200


def test_keys_are_not_logged(guarded: ServerProcess) -> None:
    guarded.client.get("/v1/models?key=first-key", headers=bearer("first-key"))
    guarded.client.get("/v1/models", headers=bearer("a-guess"))
    assert not any(key in guarded.log() for key in (*KEYS, "a-guess"))


def test_a_page_of_the_origin_may_ask(guarded: ServerProcess) -> None:
    preflight = guarded.client.options(
        "/v1/completions",
        headers={
            "Origin": ORIGIN,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "authorization,content-type",
        },
    )
    assert preflight.status_code == 200
    assert preflight.headers["access-control-allow-origin"] == ORIGIN
    refused = guarded.client.get("/v1/models", headers={"Origin": ORIGIN})
    assert refused.status_code == 401  # which the page can read:
    assert refused.headers["access-control-allow-origin"] == ORIGIN


def test_a_page_of_another_origin_may_not(guarded: ServerProcess) -> None:
    headers = {"Origin": "https://other.example", "Access-Control-Request-Method": "POST"}
    preflight = guarded.client.options("/v1/completions", headers=headers)
    assert "access-control-allow-origin" not in preflight.headers
    assert preflight.status_code == 400
    assert "origin" in preflight.json()["error"]["message"]
    response = guarded.client.get("/health", headers={"Origin": "https://other.example"})
    assert "access-control-allow-origin" not in response.headers


def test_requests_that_take_too_long(guarded: ServerProcess) -> None:
    """Whole and streamed, decoding and in prefill, at the same time."""

    def ask(prompt: list[int], stream: bool) -> tuple[int, str]:
        body = {"model": "scripted", "prompt": prompt, "max_tokens": 90_000, "stream": stream}
        response = guarded.client.post("/v1/completions", json=body, headers=bearer(KEYS[0]))
        return response.status_code, response.text

    with ThreadPoolExecutor() as threads:
        asked = [(prompt, stream) for prompt in ([50], [ENDLESS]) for stream in (False, True)]
        answers = [*threads.map(lambda arguments: ask(*arguments), asked)]
    for (_, stream), (status, text) in zip(asked, answers, strict=True):
        assert status == (200 if stream else 503)
        if stream:
            assert text.endswith("data: [DONE]\n\n")
            text = text.split("\n\n")[-3].removeprefix("data: ")
        assert json.loads(text)["error"]["message"] == "the request took longer than 1 s"
    wait_until("freed", guarded.is_idle)


def test_a_json_line_says_what_was_done(guarded: ServerProcess) -> None:
    body = {"model": "scripted", "prompt": "a secret of mine", "max_tokens": 3}
    headers = {**bearer(KEYS[0]), "X-Request-Id": "mine-1"}
    assert guarded.client.post("/v1/completions", json=body, headers=headers).status_code == 200

    def line() -> dict[str, Any] | None:
        entries = map(json.loads, guarded.log().splitlines())  # every line is JSON
        return next((entry for entry in entries if entry.get("request_id") == "mine-1"), None)

    entry = wait_until("logged", line)
    assert entry is not None
    assert entry["method"], entry["path"] == ("POST", "/v1/completions")
    assert (entry["status"], entry["completion_tokens"]) == (200, "3")
    assert (entry["finish_reason"], entry["level"]) == ("length", "info")
    assert entry["duration_ms"] > 0
    assert "secret" not in guarded.log()


Start = Callable[..., ServerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[ServerProcess] = []

    def start_one(**settings: Any) -> ServerProcess:
        started.append(start_scripted(tmp_path, **settings))
        return started[-1]

    yield start_one
    for server in started:
        server.stop()


def test_tls(start: Start, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=localhost "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}",
        shell=True,
        check=True,
        capture_output=True,
    )
    server = start(tls_certificate=str(certificate), tls_key=str(key))
    context = ssl.create_default_context(cafile=str(certificate))
    with httpx.Client(base_url=f"https://127.0.0.1:{server.port}", verify=context) as client:
        wait_until("ready", lambda: client.get("/ready").status_code == 200)
        body = {"model": "scripted", "prompt": "a", "max_tokens": 20, "stream": True}
        assert client.post("/v1/completions", json=body).text.endswith("data: [DONE]\n\n")
    with pytest.raises(httpx.RemoteProtocolError):
        server.client.get("/health")  # not in the clear
    assert "Traceback" not in server.log()


def test_a_unix_socket_is_made_and_removed(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    server = start(uds=str(path))
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), timeout=60) as client:
        wait_until("ready", lambda: client.get("http://x/ready").status_code == 200)
        body = {"model": "scripted", "prompt": "a", "max_tokens": 2}
        assert client.post("http://x/v1/completions", json=body).status_code == 200
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    assert not path.exists()
