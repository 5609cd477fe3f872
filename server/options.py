"""ServerOptions: what whoever starts the HTTP side chooses, checked by the command line.

The engine's options are EngineConfig's. Everything here can be pickled: workers are spawned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DEFAULT_MAX_BODY_BYTES = 32 << 20
DEFAULT_SHUTDOWN_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class ServerOptions:
    """Times are seconds. `uds`: a path to listen at instead of host and port. `api_keys`: any of
    them opens what is not open to all; none opens everything. `receive_timeout`: for a request's
    head, and to begin with for its body. `request_timeout`: for a whole request, None for no limit.
    `generation_config`: whether sampling defaults come from the checkpoint's file of that name."""

    model_path: str
    served_names: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    tls_certificate: str | None = None
    tls_key: str | None = None
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES
    receive_timeout: float = 30.0
    request_timeout: float | None = None
    step_timeout: float | None = None  # see AsyncEngine
    shutdown_timeout: float = DEFAULT_SHUTDOWN_TIMEOUT_S
    num_workers: int = 1
    generation_config: Literal["auto", "none"] = "auto"
    chat_template: str | None = None
    enable_profiling: bool = False
    log_level: int = 20
    log_format: Literal["text", "json"] = "text"
