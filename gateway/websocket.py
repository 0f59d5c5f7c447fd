"""`/v1/ws`: many generations on one WebSocket; docs/websocket.md is its protocol.

The handshake: origin, key, encoding. ws_session.py serves what follows.
"""

import asyncio
from collections.abc import Sequence
from urllib.parse import urlsplit
from weakref import WeakSet

from aiohttp import WSCloseCode, web

from headrace.gateway.auth import bearer, unauthorized
from headrace.gateway.errors import ApiError, bad_request
from headrace.gateway.ws_format import JSON_PROTOCOL, MSGPACK_PROTOCOL, Format, JsonFormat, MsgpackFormat
from headrace.gateway.ws_session import Session, SocketServices

PATH = "/v1/ws"
HEARTBEAT_S = 30.0  # a ping after so much silence; no pong within half of it = gone
CLOSE_TIMEOUT_S = 1.0  # for the client's answer to a close
PROTOCOLS = (JSON_PROTOCOL, MSGPACK_PROTOCOL)


def add_websocket(
    app: web.Application, services: SocketServices, *, origins: Sequence[str], max_frame_bytes: int
) -> None:
    """Add the route, and close its sockets when the application shuts down.

    Args:
        origins: of web pages that may connect besides our own, as for CORS; "*" = any.
        max_frame_bytes: a larger frame closes the socket with code 1009.
    """
    sessions: WeakSet[Session] = WeakSet()
    stats = services.stats

    async def serve(request: web.Request) -> web.StreamResponse:
        _check_origin(request, origins)
        tenant = _tenant(request, services)
        socket = web.WebSocketResponse(
            protocols=_offered(request),
            heartbeat=HEARTBEAT_S,
            timeout=CLOSE_TIMEOUT_S,
            max_msg_size=max_frame_bytes,
            compress=False,
        )
        await socket.prepare(request)
        format_: Format = MsgpackFormat() if socket.ws_protocol == MSGPACK_PROTOCOL else JsonFormat()
        session = Session(socket, request, format_, services, tenant)
        sessions.add(session)
        stats.websockets += 1
        stats.open_websockets += 1
        try:
            await session.run()
        finally:
            stats.open_websockets -= 1
        return socket

    async def say_goodbye(_app: web.Application) -> None:
        reason = "the server is shutting down"
        await asyncio.gather(*(session.close(WSCloseCode.GOING_AWAY, reason) for session in sessions))

    app.router.add_get(PATH, serve)
    app.on_shutdown.append(say_goodbye)


def _check_origin(request: web.Request, origins: Sequence[str]) -> None:
    """Browsers let any page open a WebSocket to anywhere: a page of another site must be allowed by name."""
    origin = request.headers.get("Origin")
    if origin is None or "*" in origins or origin in origins:
        return
    if urlsplit(origin).netloc != request.headers.get("Host"):
        raise ApiError(403, f"the origin {origin[:200]} is not allowed here (--cors-origin)", code="origin")


def _tenant(request: web.Request, services: SocketServices) -> str | None:
    """None = no key was sent with the handshake: browsers cannot, they send it in the first frame."""
    key = bearer(request)
    if services.keys.open or key:
        tenant = services.keys.tenant(key)
        if tenant is None:
            raise unauthorized(key)
        return tenant
    return None


def _offered(request: web.Request) -> Sequence[str]:
    """Our protocols, unless the client speaks only others."""
    asked = request.headers.get("Sec-WebSocket-Protocol")
    if asked is not None and not {name.strip() for name in asked.split(",")} & set(PROTOCOLS):
        raise bad_request(f"none of the subprotocols {asked[:200]!r} is one of {', '.join(PROTOCOLS)}")
    return PROTOCOLS
