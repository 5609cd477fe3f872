"""Malformed and hostile HTTP requests to a deltaserve server, as bytes; all follow from a seed.

What a server owes to each of them is stated in `break_server`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

End = Literal["read", "half_close", "close", "reset"]

ROUTES = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/models",
    "/v1/models/a/b",
    "/tokenize",
    "/detokenize",
    "/tokenizer_info",
    "/health",
    "/ready",
    "/version",
    "/metrics",
    "/openapi.json",
    "/",
    "//",
    "/%00",
    "/%ff%fe",
    "/../../etc/passwd",
    "/v1/models/" + "a" * 3000,
)
METHODS = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE", "PROPFIND")
_FIELDS = """model prompt tokens max_tokens min_tokens temperature top_p top_k min_p
presence_penalty frequency_penalty repetition_penalty logit_bias seed stop stop_token_ids ignore_eos
skip_special_tokens include_stop_str_in_output logprobs prompt_logprobs echo n best_of suffix stream
stream_options user allowed_token_ids bad_words response_format guided_json guided_regex
structured_outputs return_token_ids priority cache_salt unknown_field"""
_CHAT_FIELDS = """messages tools tool_choice parallel_tool_calls max_completion_tokens logprobs
top_logprobs chat_template_kwargs add_generation_prompt continue_final_message reasoning_effort
response_format functions modalities chat_template stream n stop"""
_MESSAGE_FIELDS = """role content name reasoning_content reasoning tool_calls tool_call_id refusal
audio function_call unknown_field"""
_VALUES = r"""null true false 0 -1 1 2 128 129 1e5 1e308 -1e308 1e400 1.5 -0.0 NaN -Infinity
Infinity "" "x" "\ud800" "\udc00\ud800" "\u0000" [] {} [[]] [{}] [null] [""] ["\ud83d"] [50] [-1]
[1.5] [true] [1e30] {"a":1} {"1":1e400} {"1":"x"} {"-1":5} {"99999999999999999999":1}
{"type":"json_object"} {"include_usage":1} {"a":{"b":[]}} "auto" "required" {"type":"function"}
[{"type":"function"}] [{"type":"function","function":{"name":"f","parameters":{"$ref":"#"}}}]
[{"role":"user"}] [{"role":"assistant","content":[{"type":"image_url"}]}] "assistant" "tool"
[{"function":{"name":"f","arguments":"{"}}] [{"type":"text","text":5}] {"enable_thinking":[]}"""
BIG_VALUES = (
    "9" * 400,
    "-" + "9" * 5000,
    "[" * 3000 + "]" * 3000,
    '{"a":' * 3000 + "1" + "}" * 3000,
    '"' + "\\u00e9" * 5000 + '"',
    "[" + ",".join(["50"] * 20000) + "]",
    "[" + ",".join(['"a"'] * 3000) + "]",
    "{" + ",".join(f'"{n}":1' for n in range(5000)) + "}",
)
BODIES: tuple[bytes, ...] = (
    b"",
    b" ",
    b"null",
    b"[]",
    b'"x"',
    b"{",
    b"}",
    b'{"model"',
    b'{"a":1,}',
    b"{'a':1}",
    b"\xef\xbb\xbf{}",
    '{"model":"x"}'.encode("utf-16"),
    '{"model":"x"}'.encode("utf-32"),
    b'{"model":"\xff\xfe"}',
    b'{"model":"\xed\xa0\x80"}',
    b'{"prompt":"\x00"}',
    b"\x00" * 1000,
    b"[" * 90_000,
    b'{"a":' * 18_000,
    b'{"a":1}' * 100,
    b'{"model":1,"model":2,"prompt":[],"prompt":""}',
    b"1e999999999",
    b"9" * 90_000,
)


@dataclass(frozen=True)
class Hostile:
    """`parts` are sent one after another; then the connection `ends` so."""

    name: str
    parts: tuple[bytes, ...]
    ends: End = "read"
    statuses: frozenset[int] = field(default=frozenset())  # empty: any below 500


def request(
    body: bytes,
    *,
    method: str = "POST",
    path: str = "/v1/completions",
    headers: str = "",
    close: bool = True,
) -> bytes:
    """A well-framed request."""
    connection = "Connection: close\r\n" if close else ""
    return (
        f"{method} {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n{connection}{headers}\r\n"
    ).encode("latin-1") + body


def completion(model: str, **fields: Any) -> bytes:
    return json.dumps({"model": model, "prompt": [150, 50], "max_tokens": 1, **fields}).encode()


def hostile_requests(rng: random.Random, model: str, count: int) -> Iterator[Hostile]:
    """`count` of them, each kind in turn."""
    kinds: tuple[Callable[[random.Random, str], Hostile], ...] = (
        _wrong_field,
        _wrong_field,
        _wrong_chat,
        _wrong_body,
        _wrong_route,
        _wrong_framing,
        _wrong_headers,
        _pipelined,
        _truncated,
        _mutated,
    )
    for n in range(count):
        yield kinds[n % len(kinds)](rng, model)


def _wrong_field(rng: random.Random, model: str) -> Hostile:
    name = rng.choice(_FIELDS.split())
    value = rng.choice(BIG_VALUES) if rng.random() < 0.1 else rng.choice(_VALUES.split())
    valid = {"model": json.dumps(model), "prompt": "[150, 50]", "max_tokens": "1"}
    fields = {**valid, name: value}
    path = rng.choice(("/v1/completions", "/v1/completions", "/tokenize", "/detokenize"))
    return Hostile(f"{path} {name}={value[:40]}", (request(_object(fields).encode(), path=path),))


def _wrong_chat(rng: random.Random, model: str) -> Hostile:
    """A wrong field of a chat, or of one of its messages."""
    value = rng.choice(BIG_VALUES) if rng.random() < 0.1 else rng.choice(_VALUES.split())
    message = {"role": '"user"', "content": '"hi"'}
    within = rng.random() < 0.5
    name = rng.choice((_MESSAGE_FIELDS if within else _CHAT_FIELDS).split())
    if within:
        message[name] = value
    fields = {"model": json.dumps(model), "max_tokens": "1", "messages": f"[{_object(message)}]"}
    if not within:
        fields[name] = value
    path = "/v1/chat/completions" if rng.random() < 0.8 else "/tokenize"
    return Hostile(f"{path} {name}={value[:40]}", (request(_object(fields).encode(), path=path),))


def _object(fields: dict[str, str]) -> str:
    return "{" + ",".join(f'"{key}":{text}' for key, text in fields.items()) + "}"


def _wrong_body(rng: random.Random, model: str) -> Hostile:
    body = rng.choice(BODIES)
    path = rng.choice(("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"))
    return Hostile(
        f"{path} body {body[:30]!r}", (request(body, path=path),), statuses=frozenset({400})
    )


def _wrong_route(rng: random.Random, model: str) -> Hostile:
    method, path = rng.choice(METHODS), rng.choice(ROUTES)
    body = b"" if method in ("GET", "HEAD") else b"{}"
    return Hostile(f"{method} {path[:60]}", (request(body, method=method, path=path),))


def _wrong_framing(rng: random.Random, model: str) -> Hostile:
    body = completion(model)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    chunk = b"%x\r\n%b\r\n" % (len(body), body)
    upgrade = b"Connection: Upgrade\r\nUpgrade: h2c\r\n"
    length = b"Content-Length: %d\r\n" % len(body)
    chunked, close = b"Transfer-Encoding: chunked\r\n", b"Connection: close\r\n"
    cases: dict[str, tuple[bytes, ...]] = {
        "negative length": (head + b"Content-Length: -1\r\n\r\n" + body,),
        "two lengths": (head + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n" + body,),
        "length is text": (head + b"Content-Length: ten\r\n\r\n" + body,),
        "length over 64 bits": (head + b"Content-Length: %d\r\n\r\n" % 2**70 + body,),
        "length over the limit": (head + b"Content-Length: %d\r\n\r\n" % 2**40 + body,),
        "length and chunks": (head + length + chunked + b"\r\n" + chunk + b"0\r\n\r\n",),
        "unknown coding": (head + b"Transfer-Encoding: gzip\r\n\r\n" + body,),
        "chunk size is text": (head + chunked + b"\r\nzz\r\n" + body,),
        "chunk size huge": (head + chunked + b"\r\n" + b"f" * 40 + b"\r\n",),
        "chunks over the limit": (
            head + chunked + b"\r\n" + (b"ffff\r\n" + b"x" * 65535 + b"\r\n") * 4,
        ),
        "trailers": (head + chunked + close + b"\r\n" + chunk + b"0\r\nHost: y\r\n\r\n",),
        "many tiny chunks": (
            head
            + chunked
            + close
            + b"\r\n"
            + b"".join(b"1\r\n%c\r\n" % byte for byte in body)
            + b"0\r\n\r\n",
        ),
        "upgrade with a body": (head + upgrade + length + b"\r\n" + body,),
        "upgrade, body later": (head + upgrade + length + b"\r\n", body),
        "upgrade with chunks": (
            head + upgrade + chunked + b"\r\n",
            chunk + b"0\r\n\r\n",
        ),
        "upgrade to websocket": (
            b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: upgrade\r\nUpgrade: websocket\r\n"
            b"Sec-WebSocket-Key: x\r\nSec-WebSocket-Version: 13\r\n\r\n",
        ),
        "expect": (
            head + b"Expect: 100-continue\r\nConnection: close\r\n" + length + b"\r\n",
            body,
        ),
        "expect something else": (
            head + b"Expect: the worst\r\nConnection: close\r\n" + length + b"\r\n" + body,
        ),
        "bytes after close": (request(body) + b"\x00\xffGET / HTTP/1.1\r\n\r\n",),
    }
    name = rng.choice(sorted(cases))
    return Hostile(name, cases[name], "half_close")


def _wrong_headers(rng: random.Random, model: str) -> Hostile:
    line = b"GET /health HTTP/1.1\r\n"
    end = b"Connection: close\r\n\r\n"
    cases: dict[str, bytes] = {
        "no request": b"\r\n\r\n\r\n",
        "random bytes": rng.randbytes(300),
        "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(100),
        "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        "HTTP/0.9": b"GET /\r\n",
        "HTTP/1.0": b"GET /health HTTP/1.0\r\n\r\n",
        "HTTP/9.9": b"GET /health HTTP/9.9\r\n\r\n",
        "no colon": line + b"Host x\r\n" + end,
        "space in a name": line + b"Ho st: x\r\n" + end,
        "control characters": line + b"X: \x01\x02\x7f\r\n" + end,
        "not ASCII": line + "X: é€😀\r\n".encode() + end,
        "folded": line + b"X: a\r\n  b\r\n" + end,
        "bare LF": b"GET /health HTTP/1.1\nHost: x\n\n",
        "10,000 headers": line + b"".join(b"X-%d: y\r\n" % n for n in range(10_000)) + end,
        "a header of 300 kB": line + b"X: " + b"a" * 300_000 + b"\r\n" + end,
        "a header without an end": line + b"X: " + b"a" * 300_000,
        "a target of 300 kB": b"GET /" + b"a" * 300_000 + b" HTTP/1.1\r\n" + end,
        "a target that is not ASCII": "GET /é HTTP/1.1\r\n".encode() + end,
        "target *": b"OPTIONS * HTTP/1.1\r\n" + end,
        "target absolute": b"GET http://x/health HTTP/1.1\r\n" + end,
        "target absolute, broken": b"GET http://[::1/health HTTP/1.1\r\n" + end,
        "CONNECT": b"CONNECT example.com:443 HTTP/1.1\r\n" + end,
        "forged request id": line + b"X-Request-Id: a\tb\r\n" + end,
        "origin": line + b"Origin: http://evil\r\n" + end,
        "empty authorization": line + b"Authorization:\r\n" + end,
        "authorization that is not ASCII": line + b"Authorization: Bearer \xff\xfe\r\n" + end,
        "wrong content types": request(completion(model), headers="Content-Type: text/xml\r\n"),
    }
    name = rng.choice(sorted(cases))
    return Hostile(name, (cases[name],), "half_close")


def _pipelined(rng: random.Random, model: str) -> Hostile:
    count = rng.choice((2, 3, 20, 200))
    parts = [
        rng.choice(
            (
                request(b"", method="GET", path="/health", close=False),
                request(completion(model), close=False),
                request(b"{", close=False),
                request(b"", method="GET", path="/nope", close=False),
            )
        )
        for _ in range(count)
    ]
    if rng.random() < 0.3:
        parts.append(b"\x00\x01garbage\r\n\r\n")
    end = rng.choice(("half_close", "half_close", "close", "reset"))
    return Hostile(f"{count} at once, {end}", (b"".join(parts),), end)  # type: ignore[arg-type]


def _truncated(rng: random.Random, model: str) -> Hostile:
    stream = rng.random() < 0.5
    whole = request(completion(model, stream=stream, max_tokens=50))
    cut = whole[: rng.randrange(len(whole) + 1)]
    end = rng.choice(("half_close", "close", "reset"))
    return Hostile(f"{len(cut)} of {len(whole)} bytes, {end}", (cut,), end)  # type: ignore[arg-type]


def _mutated(rng: random.Random, model: str) -> Hostile:
    whole = bytearray(request(completion(model)))
    for _ in range(rng.randint(1, 4)):
        whole[rng.randrange(len(whole))] = rng.randrange(256)
    return Hostile("mutated", (bytes(whole),), "half_close")
