"""Reading a JSON body: its type, its size and its pace, before anyone looks inside."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from .errors import ApiError

BYTES_PER_S = 16 << 10
"""Slower bodies are given up once the time to begin with has passed."""


async def read_json_body(request: Request, max_bytes: int) -> bytes:
    """Raises ApiError 415 for another content type; and, closing the connection for the rest is not
    read, 413 over `max_bytes` and 408 for a body that does not come."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"Content-Type must be application/json, got {kind[:100] or 'none'!r}")
    too_large = _closing(413, f"the body is larger than {max_bytes} bytes")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length) > max_bytes:
        raise too_large
    timeout: float = request.app.state.server.options.receive_timeout
    began = asyncio.get_running_loop().time()
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(timeout) as deadline:
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise too_large
                parts.append(part)
                deadline.reschedule(began + timeout + size / BYTES_PER_S)
    except TimeoutError:
        raise _closing(408, f"the body came too slowly: {size} bytes so far") from None
    return b"".join(parts)


def _closing(status: int, message: str) -> ApiError:
    return ApiError(status, message, headers={"Connection": "close"})
