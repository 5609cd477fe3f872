"""What a connection asks of its socket beside bytes: who it is to, and whether anyone is there."""

from __future__ import annotations

import asyncio
import socket

_KEEP_ALIVE_IDLE_S = 60
_TCP_CLOSE = 7  # Linux's tcp_states.h


def is_tcp(sock: socket.socket | None) -> bool:
    return sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6)


def probe_when_idle(sock: socket.socket) -> None:
    """A host that vanished is noticed, if late."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _KEEP_ALIVE_IDLE_S)


def is_reset(sock: socket.socket) -> bool:
    """Whether the peer has answered something with a reset, without reading."""
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _TCP_CLOSE


def address(name: object) -> tuple[str, int] | None:
    """A socket's name as ASGI has it; None for Unix sockets."""
    return (str(name[0]), int(name[1])) if isinstance(name, tuple) else None


def abort_when_reset(
    loop: asyncio.AbstractEventLoop, transport: asyncio.Transport, delay: float
) -> None:
    """For a transport that is read no more: a reset is found by asking for the connection's state,
    now, after `delay` seconds, and then ever less often, down to once a second."""
    if transport.is_closing():
        return
    if is_reset(transport.get_extra_info("socket")):
        transport.abort()
        return
    loop.call_later(delay, abort_when_reset, loop, transport, min(2 * delay, 1.0))
