"""ApiKeys: the middleware that asks for a key wherever a model's work or name is to be had."""

from __future__ import annotations

import hashlib
import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics", "/openapi.json"})
"""For probes, scrapers and tools, which have no keys."""


class ApiKeys:
    """`Authorization: Bearer KEY` with one of `keys`, which are not empty."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            fault = self._fault(scope)
            if fault is not None:
                error = ApiError(
                    401, fault, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
                )
                await error.response()(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _fault(self, scope: Scope) -> str | None:
        values = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, key = (values[0] if values else b"").partition(b" ")
        if len(values) != 1 or kind.lower() != b"bearer" or not key.strip():
            return "an API key is required: Authorization: Bearer KEY"
        return None if self._is_known(key.strip()) else "the API key is not a valid one"

    def _is_known(self, key: bytes) -> bool:
        """In a time that tells nothing of the keys: equal lengths, and all of them compared."""
        digest = _digest(key)
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
