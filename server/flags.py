"""The flags of `deltaserve serve`: names, types, defaults and what they mean.

What a value may be beside its type is EngineConfig's and `cli`'s to check. Every flag is also a
name of the configuration file.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
from typing import Any, NoReturn

from deltaserve.engine.config import EngineConfig

from .options import DEFAULT_MAX_BODY_BYTES, DEFAULT_SHUTDOWN_TIMEOUT_S, ServerOptions
from .version import version

LOG_LEVELS = ("debug", "info", "warning", "error")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_TRUE, _FALSE = ("true", "yes", "on", "1"), ("false", "no", "off", "0")


USAGE_EXIT_CODE = 2


class UsageError(Exception):
    """What the user has to change, in one line."""


def of_flag(message: str) -> str:
    """What EngineConfig or a ConfigError says of a field, as said of its flag."""
    name, colon, rest = message.partition(":")
    if name not in {field.name for field in dataclasses.fields(EngineConfig)}:
        return message
    return f"--{name.replace('_', '-')}{colon}{rest}"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message.removeprefix('argument ')} (--help lists the flags)")


def command_parser() -> tuple[Parser, Parser]:
    """That of `deltaserve`, and that of its command `serve`."""
    parser = Parser(prog="deltaserve", description="Serves the Qwen3.5 family over HTTP.")
    parser.add_argument("--version", action="version", version=version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a checkpoint over the OpenAI completions API",
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    assert isinstance(serve, Parser)
    serve.add_argument(
        "--config", metavar="FILE.toml", help="the same names as these flags, which win over it"
    )
    serve.add_argument(
        "--dry-run",
        action="store_true",
        help="print what would go where in memory, and exit",
    )
    _add_model(serve)
    _add_http(serve)
    _add_scheduling(serve)
    _add_memory(serve)
    _add_operation(serve)
    return parser, serve


def switch_names(parser: Parser) -> frozenset[str]:
    """The flags that are on or off, as names of the configuration file."""
    return frozenset(
        action.dest for action in parser._actions if action.type is _switch or action.nargs == 0
    )


def _add_model(parser: Parser) -> None:
    add = parser.add_argument_group("model").add_argument
    add("--model-path", metavar="DIR", help="checkpoint in Hugging Face layout; required")
    add(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="name that clients use, repeatable; the first is canonical (the model path)",
    )
    add(
        "--load-format",
        choices=("safetensors", "dummy"),
        help="dummy: random weights of the config's shapes, for benchmarks (safetensors)",
    )
    add("--device", choices=("auto", "cuda", "cpu"), help="(auto: cuda where there is one)")
    add("--device-ordinal", type=int, metavar="N", help="which GPU (0)")
    add("--dtype", choices=("auto", "float32", "bfloat16"), help="of the weights (auto)")
    add(
        "--generation-config",
        choices=("auto", "none"),
        help="sampling defaults from the checkpoint's generation_config.json, or not (auto)",
    )
    add(
        "--chat-template",
        metavar="FILE",
        help="Jinja template of chats in place of the checkpoint's",
    )
    add("--seed", type=int, metavar="N", help="of requests that bring none (a random one each)")


def _add_http(parser: Parser) -> None:
    add = parser.add_argument_group("HTTP").add_argument
    add("--host", help=f"address to listen on ({ServerOptions.host})")
    add("--port", type=_port, metavar="N", help=f"0 takes a free one ({ServerOptions.port})")
    add("--uds", metavar="PATH", help="Unix-domain socket in place of host and port")
    add("--ssl-certfile", metavar="FILE", help="certificate chain, PEM: HTTPS alone is spoken")
    add("--ssl-keyfile", metavar="FILE", help="its private key (within the certificate's file)")
    add(
        "--api-key",
        action="append",
        metavar="KEY",
        help="asked for under /v1 and for the tokenizer; repeatable, any one opens; also from the "
        "environment variable DELTASERVE_API_KEY",
    )
    add("--api-key-file", metavar="FILE", help="more of them, one a line")
    add(
        "--cors-origin",
        action="append",
        metavar="ORIGIN",
        help="whose pages may ask, such as https://example.com, or *; repeatable (none)",
    )
    add(
        "--max-body-bytes",
        type=_size,
        metavar="BYTES",
        help=f"larger requests get 413 ({DEFAULT_MAX_BODY_BYTES >> 20}M)",
    )
    add("--request-timeout", type=_seconds, metavar="S", help="of a whole request; 0: none (0)")
    add("--api-workers", type=int, metavar="N", help="processes that speak HTTP (1)")


def _add_scheduling(parser: Parser) -> None:
    add = parser.add_argument_group("scheduling").add_argument
    add("--max-model-len", type=_auto_int, metavar="N|auto", help="context length (the model's)")
    add("--max-num-seqs", type=_auto_int, metavar="N|auto", help="requests that run at once (auto)")
    add(
        "--max-num-batched-tokens",
        type=_auto_int,
        metavar="N|auto",
        help="prompt tokens of a step in which nothing decodes; auto is 256 on the CPU, 8192 on "
        "CUDA",
    )
    add(
        "--prefill-chunk",
        type=_auto_int,
        metavar="N|auto",
        help="prompt tokens of a step in which something decodes, more where many do or many "
        "prompts wait; auto is 128 on the CPU, 1024 on CUDA",
    )
    add(
        "--max-queue",
        type=int,
        metavar="N",
        help="requests that wait beyond those that can run; what comes then gets 429 "
        f"({EngineConfig.max_queue})",
    )
    add("--cuda-graph", **_SWITCH, help="decode steps as CUDA graphs (true)")
    add("--no-cuda-graph", dest="cuda_graph", action="store_false")


def _add_memory(parser: Parser) -> None:
    add = parser.add_argument_group("memory").add_argument
    add(
        "--gpu-memory-utilization",
        type=float,
        metavar="SHARE",
        help=f"of the GPU's memory ({EngineConfig.gpu_memory_utilization})",
    )
    add("--kv-cache-memory", type=_size, metavar="BYTES", help="such as 8G, in place of the share")
    add(
        "--block-size",
        type=int,
        metavar="N",
        help=f"tokens of a KV cache block ({EngineConfig.block_size})",
    )
    add("--enable-prefix-caching", **_SWITCH, help="prompts share computed beginnings (true)")
    add("--no-enable-prefix-caching", dest="enable_prefix_caching", action="store_false")
    add(
        "--snapshot-memory",
        type=_size,
        metavar="BYTES",
        help="for the recurrent states of cached beginnings (a tenth of what is left)",
    )
    add(
        "--snapshot-interval",
        type=int,
        metavar="N",
        help=f"tokens between two of them ({EngineConfig.snapshot_interval})",
    )


def _add_operation(parser: Parser) -> None:
    add = parser.add_argument_group("operation").add_argument
    add(
        "--shutdown-timeout",
        type=_seconds,
        metavar="S",
        help=f"how long SIGTERM lets open requests run ({DEFAULT_SHUTDOWN_TIMEOUT_S:g})",
    )
    add("--log-level", choices=LOG_LEVELS, help="(info)")
    add("--log-format", choices=("text", "json"), help="(text)")
    add("--enable-profiling", **_SWITCH, help="POST /start_profile and /stop_profile (false)")


def _switch(text: str) -> bool:
    if text.lower() not in _TRUE + _FALSE:
        raise argparse.ArgumentTypeError(f"must be true or false, got {text!r}")
    return text.lower() in _TRUE


_SWITCH: dict[str, Any] = {"nargs": "?", "const": True, "type": _switch, "metavar": "true|false"}


def _port(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,5}", text) or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be from 0 to 65535, got {text!r}")
    return int(text)


def _auto_int(text: str) -> int | None:
    if text == "auto":
        return None
    if not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"must be a number or auto, got {text!r}")
    return int(text)


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,18})([KMG]?)(?:i?B)?", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"must be bytes, as 1048576 or 512M or 8G, got {text!r}")
    return int(match[1]) * _UNITS[match[2]]


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 86400:
        raise argparse.ArgumentTypeError(f"must be seconds from 0 to 86400, got {text!r}")
    return value
