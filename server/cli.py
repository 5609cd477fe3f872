"""The `deltaserve` command: what is wrong with its flags is said before a weight is read.

Imports are made where they are needed, so that `--version` and `--help` answer at once.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deltaserve.engine.config import ConfigError, EngineConfig, ModelConfig

from .flags import USAGE_EXIT_CODE, UsageError, command_parser, of_flag
from .options import ServerOptions

API_KEY_VARIABLE = "DELTASERVE_API_KEY"
MAX_WORKERS = 64
_OPTION_NAMES = {  # flags that are ServerOptions under another name
    "tls_certificate": "ssl_certfile",
    "tls_key": "ssl_keyfile",
    "num_workers": "api_workers",
}


def main(argv: list[str] | None = None) -> int:
    parser, serve = command_parser()
    try:
        given = vars(parser.parse_args(argv))
        if "config" in given:
            from .config_file import read_config_file

            given = {**read_config_file(given["config"], serve), **given}
        return _serve(given)
    except UsageError as error:
        print(f"deltaserve: error: {error}", file=sys.stderr)
        return USAGE_EXIT_CODE
    except KeyboardInterrupt:  # before the server had its signal handlers
        return 130


def _serve(given: Mapping[str, Any]) -> int:
    """What can be wrong without reading weights is found here."""
    if "model_path" not in given:
        raise UsageError("--model-path is required: the directory of a checkpoint")
    config = _engine_config(given)
    model = _model_config(config)
    options = _server_options(given)
    if given.get("dry_run"):
        return _print_plan(config, model)

    import functools

    from deltaserve.engine.core_process import EngineProcess, build_llm_engine

    from .lifecycle import run_server
    from .listen import listen, tls_context
    from .logs import set_up_logging

    try:
        tls_context(options)
    except OSError as error:
        raise UsageError(
            f"--ssl-certfile {options.tls_certificate}: no certificate and key can be read: {error}"
        ) from None
    try:
        listeners = listen(options)
    except OSError as error:
        address, change = f"{options.host}:{options.port}", "another --port or --host"
        if options.uds is not None:
            address, change = options.uds, "another --uds"
        raise UsageError(
            f"cannot listen on {address}: {error.strerror or error}; choose {change}"
        ) from None
    set_up_logging(options.log_level, options.log_format)
    engine_logging = functools.partial(
        set_up_logging, options.log_level, options.log_format, "engine"
    )
    process = EngineProcess(config, build_llm_engine, set_up_logging=engine_logging)
    return run_server(options, process, listeners)


def _engine_config(given: Mapping[str, Any]) -> EngineConfig:
    if "kv_cache_memory" in given and "gpu_memory_utilization" in given:
        raise UsageError("--kv-cache-memory: replaces --gpu-memory-utilization; give one of them")
    names = {field.name for field in dataclasses.fields(EngineConfig)}
    try:
        return EngineConfig(**{name: given[name] for name in names & given.keys()})
    except ValueError as error:
        raise UsageError(of_flag(str(error))) from None


def _model_config(config: EngineConfig) -> ModelConfig:
    """The config and what it asks for; weights and tokenizer are read behind the open port."""
    try:
        model = ModelConfig.from_hf(config.model_path)
    except (ValueError, OSError) as error:
        raise UsageError(f"--model-path: {error}") from None
    limit = model.max_position_embeddings
    if config.max_model_len is not None and config.max_model_len > limit:
        raise UsageError(
            f"--max-model-len: {config.max_model_len} is over the model's {limit} positions"
        )
    return model


def _server_options(given: Mapping[str, Any]) -> ServerOptions:
    chosen: dict[str, Any] = {}
    for field in dataclasses.fields(ServerOptions):
        flag = _OPTION_NAMES.get(field.name, field.name)
        if flag in given:
            chosen[field.name] = given[flag]
    chosen["served_names"] = tuple(given.get("served_model_name", [given["model_path"]]))
    chosen["api_keys"] = _api_keys(given)
    chosen["cors_origins"] = tuple(given.get("cors_origin", ()))
    chosen["request_timeout"] = given.get("request_timeout") or None
    chosen["log_level"] = getattr(logging, given.get("log_level", "info").upper())
    options = ServerOptions(**chosen)
    if not all(options.served_names):
        raise UsageError("--served-model-name: must not be empty")
    if options.max_body_bytes == 0:
        raise UsageError("--max-body-bytes: must be at least 1")
    if not 1 <= options.num_workers <= MAX_WORKERS:
        raise UsageError(
            f"--api-workers: must be from 1 to {MAX_WORKERS}, got {options.num_workers}"
        )
    if options.tls_key is not None and options.tls_certificate is None:
        raise UsageError("--ssl-keyfile: needs --ssl-certfile, the certificate of this key")
    if options.uds is not None and ("host" in given or "port" in given):
        raise UsageError("--uds: replaces --host and --port; give one or the other")
    for origin in options.cors_origins:
        if origin != "*" and not _is_origin(origin):
            raise UsageError(f"--cors-origin: must be * or as https://example.com, got {origin!r}")
    if options.chat_template is not None:
        from .chat_template import load_chat_template

        try:
            load_chat_template(options.model_path, options.chat_template)
        except ValueError as error:
            raise UsageError(f"--chat-template: {error}") from None
    return options


def _api_keys(given: Mapping[str, Any]) -> tuple[str, ...]:
    keys = list(given.get("api_key", ()))
    if "" in keys:
        raise UsageError("--api-key: must not be empty")
    if API_KEY_VARIABLE in os.environ:
        keys.append(os.environ[API_KEY_VARIABLE].strip())
        if not keys[-1]:
            raise UsageError(f"{API_KEY_VARIABLE}: is set and empty; unset it or give a key")
    if "api_key_file" in given:
        try:
            lines = Path(given["api_key_file"]).read_text().splitlines()
        except (OSError, ValueError) as error:
            raise UsageError(f"--api-key-file {given['api_key_file']}: {error}") from None
        found = [line.strip() for line in lines if line.strip()]
        if not found:
            raise UsageError(f"--api-key-file {given['api_key_file']}: holds no key")
        keys += found
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise UsageError("--api-key: must be printable ASCII without spaces, as headers are")
    return tuple(keys)


def _is_origin(text: str) -> bool:
    from urllib.parse import urlsplit

    try:
        parts = urlsplit(text)
    except ValueError:
        return False
    return bool(parts.scheme and parts.netloc) and text == f"{parts.scheme}://{parts.netloc}"


def _print_plan(config: EngineConfig, model: ModelConfig) -> int:
    from deltaserve.engine.model_loader import create_backend

    try:
        print(create_backend(config, model).plan.table())
    except ConfigError as error:
        raise UsageError(of_flag(str(error))) from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
