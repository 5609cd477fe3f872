"""RequestLog: the middleware around every route. A request id, one log line, and 500 for bugs.

Nothing of a prompt or an answer is logged, nor a query.
"""

from __future__ import annotations

import logging
import re
import time
import uuid

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import internal_error
from .logs import request_id_of_context

logger = logging.getLogger("deltaserve.access")

_REQUEST_ID = re.compile(r"[!-~]{1,128}")
CLIENT_CLOSED = 499  # nginx's number: the client left before the answer was complete
MAX_PATH = 200
_QUIET = frozenset({"/health", "/ready", "/metrics"})


class RequestLog:
    """Takes `X-Request-Id` if it is 1..128 printable characters, else makes one, and returns it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _given_id(scope) or uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        request_id_of_context.set(request_id)
        path = scope["raw_path"].decode("ascii", "replace")  # undecoded: no line breaks in it
        began = state["arrival_time"] = time.monotonic()
        status: int | None = None
        complete = False

        async def send_noting(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status = message["status"]
                header = (b"x-request-id", request_id.encode("ascii"))
                message = {**message, "headers": [*message.get("headers", ()), header]}
            elif not message.get("more_body", False):
                complete = True
            await send(message)

        try:
            await self._app(scope, receive, send_noting)
        except ClientDisconnect:
            pass
        except Exception:
            logger.exception("the request failed")
            if status is not None:
                raise
            await internal_error(request_id).response()(scope, receive, send_noting)
        finally:
            self._log(
                scope,
                path,
                status if complete and status is not None else CLIENT_CLOSED,
                (time.monotonic() - began) * 1e3,
            )

    def _log(self, scope: Scope, path: str, status: int, duration_ms: float) -> None:
        summary = scope["state"].get("summary", "")
        fields = dict(pair.split("=", 1) for pair in summary.split())
        fields |= {"method": scope["method"], "path": path[:MAX_PATH], "status": status}
        logger.log(
            logging.DEBUG if path in _QUIET else logging.INFO,
            "%s %s %d %.1f ms%s",
            scope["method"],
            path[:MAX_PATH],
            status,
            duration_ms,
            summary,
            extra={"fields": fields | {"duration_ms": round(duration_ms, 1)}},
        )


def _given_id(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            return text if _REQUEST_ID.fullmatch(text) else None
    return None
