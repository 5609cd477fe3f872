"""The sockets that clients connect to: bound before anything is loaded, one a worker.

Workers share a port by SO_REUSEPORT, each with a socket of its own, and a path by all listening on
the same one. The parent keeps every socket open, so that what waits on a dead worker's is served by
the one that follows it.
"""

from __future__ import annotations

import os
import socket
import ssl
import stat

from .options import ServerOptions

BACKLOG = 2048


def listen(options: ServerOptions) -> list[socket.socket]:
    """`options.num_workers` of them. Raises OSError."""
    if options.uds is not None:
        return [_listen_at(options.uds)] * options.num_workers
    family, _, _, _, address = socket.getaddrinfo(
        options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listeners: list[socket.socket] = []
    try:
        for _ in range(options.num_workers):
            listener = socket.socket(family, socket.SOCK_STREAM)
            listeners.append(listener)
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if options.num_workers > 1:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(listeners[0].getsockname() if len(listeners) > 1 else address)
        for listener in listeners:
            listener.listen(BACKLOG)
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _listen_at(path: str) -> socket.socket:
    """Replaces a socket that a server has left behind, and nothing else."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        try:
            listener.bind(path)
        except OSError:
            if not _is_abandoned(path):
                raise
            os.unlink(path)
            listener.bind(path)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def _is_abandoned(path: str) -> bool:
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(path)
    except ConnectionRefusedError:
        return True
    except OSError:
        pass
    return False


def address_of(options: ServerOptions, listener: socket.socket) -> str:
    """For people; with the port that was taken where any would do."""
    if options.uds is not None:
        return f"unix:{options.uds}"
    host, port = listener.getsockname()[:2]
    scheme = "http" if options.tls_certificate is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    """Raises OSError (ssl.SSLError among them) for files that are no certificate and key."""
    if options.tls_certificate is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(options.tls_certificate, options.tls_key)
    return context
