"""Listening sockets: the shared port of the workers, and the guard against connections that say nothing.

Knows no application. The supervisor reserves the port, each worker listens on it.
"""

import asyncio
import errno
import socket
from collections.abc import Callable
from weakref import WeakSet

from aiohttp import web
from aiohttp.typedefs import Handler
from aiohttp.web_protocol import RequestHandler

from headrace.config import ConfigError

BACKLOG = 4096
# A stalled client would hide megabytes of events in kernel buffers before its stream counts as slow.
SEND_BUFFER_BYTES = 64 << 10


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


def listen(host: str, port: int) -> socket.socket:
    """One worker's listening socket on the shared port; the kernel spreads connections over the workers."""
    listener = _bound(host, port, shared=True)
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # accepted sockets inherit both options
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
    listener.listen(BACKLOG)
    listener.setblocking(False)
    return listener


class HeaderGuard:
    """Closes connections whose first request has not arrived whole within `timeout_s`.

    aiohttp has one keep-alive timeout for silent and for idle connections; a client that trickles headers
    deserves less time than one that rests between requests.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._spoke: WeakSet[object] = WeakSet()

    @web.middleware
    async def middleware(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Marks the connection of a request as one that spoke."""
        self._spoke.add(request.protocol)
        return await handler(request)

    def factory(self, make: Callable[[], RequestHandler]) -> Callable[[], RequestHandler]:
        """Wrap a protocol factory, such as aiohttp's server."""
        loop = asyncio.get_running_loop()

        def guarded() -> RequestHandler:
            protocol = make()
            loop.call_later(self._timeout_s, self._check, protocol)
            return protocol

        return guarded

    def _check(self, protocol: RequestHandler) -> None:
        if protocol not in self._spoke:
            protocol.force_close()


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
