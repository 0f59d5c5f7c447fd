"""One accepted connection: a high-water mark for back-pressure, a limit on how long headers may take, and
protocol errors answered in OpenAI's shape.

Extends aiohttp's RequestHandler by its public methods only. The worker passes `connections(...)` to
`loop.create_server`; `track_requests` is its middleware.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import cast

from aiohttp import web
from aiohttp.typedefs import Handler

from headrace.config import GatewayConfig
from headrace.gateway.answers import error_response
from headrace.gateway.errors import ApiError

log = logging.getLogger(__name__)

# Bytes in the kernel, set on the listening socket; its default hides megabytes from a reader's back-pressure.
SEND_BUFFER = 64 << 10
HIGH_WATER = 32 << 10  # bytes in the process before a stream counts as slow
LOW_WATER = 8 << 10
KEEP_ALIVE_S = 75.0  # idle connections; longer than most proxies keep theirs
LINGER_S = 2.0  # how long an unread body is still swallowed, so that the client sees the answer


class Connection(web.RequestHandler):
    """The protocol of one connection; a timer runs whenever request headers are due but not complete."""

    __slots__ = ("_header_timeout_s", "_header_timer", "_num_running")

    def __init__(self, server: web.Server, loop: asyncio.AbstractEventLoop, header_timeout_s: float) -> None:
        super().__init__(
            server,
            loop=loop,
            keepalive_timeout=KEEP_ALIVE_S,
            lingering_time=LINGER_S,
            access_log=None,  # type: ignore[arg-type] # off, as AppRunner allows
        )
        self._header_timeout_s = header_timeout_s
        self._header_timer: asyncio.TimerHandle | None = None
        self._num_running = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        # A cast, because uvloop's transports are no subclasses of asyncio's.
        cast("asyncio.WriteTransport", transport).set_write_buffer_limits(HIGH_WATER, LOW_WATER)
        self._arm()

    def data_received(self, data: bytes) -> None:
        if self._header_timer is None and not self._num_running:
            self._arm()
        super().data_received(data)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._disarm()
        super().connection_lost(exc)

    def request_begins(self) -> None:
        """Headers are complete."""
        self._num_running += 1
        self._disarm()

    def request_ends(self) -> None:
        self._num_running -= 1

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Answer what never reached the application: malformed or oversized headers."""
        if isinstance(exc, ConnectionError):
            raise exc
        if request.writer.output_size > 0:
            raise ConnectionError("the answer has begun; it cannot become an error")
        self._disarm()
        if status >= 500:
            log.error("a request failed outside of its handler", exc_info=exc)
            answer = error_response(ApiError(status, "internal error", code="internal_error"))
        else:
            reason = " ".join((message or "malformed").split())[:200]
            answer = error_response(
                ApiError(status, f"this is no valid HTTP request: {reason}", code="bad_http")
            )
        answer.force_close()
        return answer

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self._header_timer = loop.call_later(self._header_timeout_s, self._headers_late)

    def _disarm(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _headers_late(self) -> None:
        self._header_timer = None
        if not self._num_running:
            self.force_close()


def connections(server: web.Server, settings: GatewayConfig) -> Callable[[], Connection]:
    """The protocol factory for `loop.create_server`, over `runner.server` of a set-up AppRunner.

    The runner must be made with `handler_cancellation=True`: a disconnect then cancels its handler.
    """
    loop = asyncio.get_running_loop()
    return lambda: Connection(server, loop, settings.header_timeout_s)


@web.middleware
async def track_requests(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Tell the connection when a request begins and ends; outermost of all middlewares."""
    connection = request.protocol
    if not isinstance(connection, Connection):
        return await handler(request)
    connection.request_begins()
    try:
        return await handler(request)
    finally:
        connection.request_ends()
