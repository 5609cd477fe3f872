"""Reading a JSON body: its type and its size, before anyone looks inside."""

from __future__ import annotations

from starlette.requests import Request

from .errors import ApiError


async def read_json_body(request: Request, max_bytes: int) -> bytes:
    """Raises ApiError 415 for another content type and 413 over `max_bytes`, which closes the
    connection: the rest of the body is not read."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"Content-Type must be application/json, got {kind or 'none'!r}")
    too_large = ApiError(
        413, f"the body is larger than {max_bytes} bytes", headers={"Connection": "close"}
    )
    length = request.headers.get("content-length", "")
    if length.isdigit() and int(length) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    size = 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise too_large
        parts.append(part)
    return b"".join(parts)
