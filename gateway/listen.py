"""Listening sockets on the shared port of the workers.

Knows no application. The supervisor reserves the port, each worker listens on it.
"""

import errno
import socket

from headrace.config import ConfigError
from headrace.gateway.connection import SEND_BUFFER

BACKLOG = 4096


def reserve_port(host: str, port: int) -> socket.socket:
    """Bind without listening: connections go to the workers alone, and nobody else gets the port meanwhile.

    Args:
        port: 0 = any free one; read it back with `getsockname`.

    Raises:
        ConfigError: the port is in use, or the address is not ours.
    """
    # Without SO_REUSEPORT first: it would join another service of the same user on the port, unnoticed.
    with _bound(host, port, shared=False) as probe:
        port = probe.getsockname()[1]
    return _bound(host, port, shared=True)


def worker_socket(host: str, port: int) -> socket.socket:
    """One worker's socket on the shared port, ready to listen; the kernel spreads connections over the workers."""
    listener = _bound(host, port, shared=True)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit both options
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
    listener.setblocking(False)
    return listener


def _bound(host: str, port: int, *, shared: bool) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise ConfigError(f"host: {host!r} is not an address: {error.strerror}") from error
    bound = socket.socket(family, kind, proto)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ConfigError(_why(host, port, error)) from error
    return bound


def _why(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"port {port} on {host} is in use; stop what runs there or choose another with --port"
    if error.errno == errno.EACCES:
        return f"port {port} on {host} needs more rights; choose one above 1023 with --port"
    return f"cannot listen on {host}:{port}: {error.strerror}"
