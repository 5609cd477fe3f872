"""The `deltaserve` command: its flags, and what is wrong with them before a weight is read.

Imports are made where they are needed, so that `--version` and `--help` answer at once.
"""

from __future__ import annotations

import argparse
import re
import sys
from typing import TYPE_CHECKING, NoReturn

from deltaserve.engine.config import EngineConfig, ModelConfig

from .version import version

if TYPE_CHECKING:
    from .lifecycle import ServerOptions

LOG_LEVELS = ("debug", "info", "warning", "error")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}
_ENGINE_FLAGS = (
    "model_path",
    "load_format",
    "device",
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "prefill_chunk",
    "block_size",
    "kv_cache_memory",
    "max_queue",
    "seed",
)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as all our errors are."""
        self.exit(2, f"{self.prog}: error: {message} (--help lists the flags)\n")


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    try:
        return _serve(args)
    except _UsageError as error:
        print(f"deltaserve serve: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:  # before the server had its signal handlers
        return 130


class _UsageError(Exception):
    """What the user has to change, in one line."""


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="deltaserve", description="Serves the Qwen3.5 family over HTTP.")
    parser.add_argument("--version", action="version", version=version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve",
        help="serve a checkpoint over the OpenAI completions API",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    add = serve.add_argument
    add("--model-path", required=True, metavar="DIR", help="checkpoint in Hugging Face layout")
    add(
        "--load-format",
        choices=("safetensors", "dummy"),
        default=EngineConfig.load_format,
        help="dummy: random weights of the config's shapes, for benchmarks",
    )
    add(
        "--served-model-name",
        action="append",
        metavar="NAME",
        help="name that clients use, repeatable; the first is canonical (default: the model path)",
    )
    add("--host", default="127.0.0.1", help="address to listen on")
    add("--port", type=_port, default=8000, help="0 takes a free one")
    add("--device", choices=("auto", "cuda", "cpu"), default=EngineConfig.device, help="backend")
    add(
        "--dtype",
        choices=("auto", "float32", "bfloat16"),
        default=EngineConfig.dtype,
        help="of the weights",
    )
    add("--max-model-len", type=_auto_int, default="auto", metavar="N|auto", help="context length")
    add("--max-num-seqs", type=int, default=None, metavar="N", help="requests that run at once")
    add(
        "--max-num-batched-tokens",
        type=_auto_int,
        default="auto",
        metavar="N|auto",
        help="prompt tokens of a step in which nothing decodes; auto is 256 on the CPU, 8192 on "
        "CUDA",
    )
    add(
        "--prefill-chunk",
        type=_auto_int,
        default="auto",
        metavar="N|auto",
        help="prompt tokens of a step in which something decodes; auto is 128 on the CPU, 1024 on "
        "CUDA",
    )
    add(
        "--block-size",
        type=int,
        default=EngineConfig.block_size,
        metavar="N",
        help="tokens of a KV cache block",
    )
    add("--kv-cache-memory", type=_size, default=None, metavar="BYTES", help="such as 8G")
    add(
        "--max-queue",
        type=int,
        default=EngineConfig.max_queue,
        metavar="N",
        help="waiting requests, 1 or more; what comes beyond gets 429",
    )
    add("--max-body-bytes", type=_size, default="32M", metavar="BYTES", help="larger gets 413")
    add("--seed", type=int, default=None, help="of requests that bring none (default: random)")
    add(
        "--shutdown-timeout",
        type=_seconds,
        default=30.0,
        metavar="S",
        help="how long SIGTERM lets open requests run",
    )
    add("--log-level", choices=LOG_LEVELS, default="info")
    return parser


def _serve(args: argparse.Namespace) -> int:
    """What can be wrong without reading weights is found here."""
    import logging

    level = getattr(logging, args.log_level.upper())
    config = _engine_config(args)
    _check_model(config.model_path)

    from deltaserve.engine.core_process import EngineProcess

    from .lifecycle import bind, run_server

    options = _server_options(args)
    try:
        listener = bind(options.host, options.port)
    except OSError as error:
        raise _UsageError(
            f"cannot listen on {options.host}:{options.port}: {error.strerror or error}; choose "
            "another --port or --host"
        ) from None
    logging.basicConfig(
        level=level, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr
    )
    return run_server(options, EngineProcess(config, log_level=level), listener)


def _engine_config(args: argparse.Namespace) -> EngineConfig:
    try:
        return EngineConfig(**{name: getattr(args, name) for name in _ENGINE_FLAGS})
    except ValueError as error:
        name, colon, rest = str(error).partition(":")
        raise _UsageError(f"--{name.replace('_', '-')}{colon}{rest}") from None


def _check_model(path: str) -> None:
    """The config and what it asks for; weights and tokenizer are read behind the open port."""
    try:
        ModelConfig.from_hf(path)
    except (ValueError, OSError) as error:
        raise _UsageError(f"--model-path: {error}") from None


def _server_options(args: argparse.Namespace) -> ServerOptions:
    from .lifecycle import ServerOptions

    return ServerOptions(
        model_path=args.model_path,
        served_names=tuple(args.served_model_name or [args.model_path]),
        host=args.host,
        port=args.port,
        max_body_bytes=args.max_body_bytes,
        shutdown_timeout=args.shutdown_timeout,
    )


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be from 0 to 65535, got {text!r}")
    return int(text)


def _auto_int(text: str) -> int | None:
    if text == "auto":
        return None
    if not re.fullmatch(r"-?\d{1,18}", text):
        raise argparse.ArgumentTypeError(f"must be a number of tokens or auto, got {text!r}")
    return int(text)


def _size(text: str) -> int:
    match = re.fullmatch(r"(\d{1,18})([KMG]?)(?:i?B)?", text)
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


if __name__ == "__main__":
    sys.exit(main())
