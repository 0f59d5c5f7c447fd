"""One HTTP connection of a load test: writes a request, hands the answer's pieces on, says when it has ended.

Called by client.py; parsing is client_http.py's and client_sse.py's.
"""

import asyncio
from time import perf_counter
from typing import cast

from headrace.loadtest.client_http import COMPLETE, BadResponse, ResponseParser
from headrace.loadtest.client_sse import SseReader
from headrace.loadtest.exchange import Exchange

MAX_ERROR_BODY = 64 << 10


class HttpConnection(asyncio.Protocol):
    """Runs one exchange at a time."""

    __slots__ = (
        "_body",
        "_exchange",
        "_now",
        "_parser",
        "_reader",
        "_status",
        "_transport",
        "_waiter",
    )

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = ResponseParser(self._on_head, self._on_body)
        self._waiter: asyncio.Future[None] | None = None
        self._exchange: Exchange | None = None
        self._reader: SseReader | None = None
        self._status = 0
        self._body = bytearray()  # of an answer that is no event stream
        self._now = 0.0

    @property
    def reusable(self) -> bool:
        """Whether another request may be sent on it."""
        transport = self._transport
        if transport is None or transport.is_closing() or self._waiter is not None:
            return False
        return self._parser.state == COMPLETE and self._parser.keep_alive

    async def run(self, exchange: Exchange, request: bytes) -> None:
        """Send the request; returns at the end of its answer. What goes wrong is written into the exchange."""
        assert self._transport is not None
        self._exchange, self._reader, self._status = exchange, None, 0
        self._body.clear()
        self._parser.begin()
        self._waiter = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            await self._waiter
        finally:
            self._waiter = self._exchange = None
            if self._parser.state != COMPLETE:  # cancelled or timed out: what still comes is nobody's
                self._transport.abort()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._now = perf_counter()
        try:
            self._parser.feed(data)
        except BadResponse as error:
            self._fail("bad_response", str(error))
            return
        if self._parser.state == COMPLETE:
            self._complete()

    def connection_lost(self, error: Exception | None) -> None:
        self._now = perf_counter()
        try:
            self._parser.close()
        except BadResponse:
            self._fail("closed", str(error) if error else "the server closed the connection before the end")
            return
        self._complete()

    def _on_head(self, status: int, headers: dict[str, str]) -> None:
        self._status = status
        if status == 200 and headers.get("content-type", "").startswith("text/event-stream"):
            assert self._exchange is not None
            self._reader = SseReader(self._exchange)

    def _on_body(self, payload: bytes) -> None:
        if self._reader is not None:
            self._reader.feed(payload, self._now)
        elif len(self._body) < MAX_ERROR_BODY:
            self._body += payload

    def _complete(self) -> None:
        exchange = self._exchange
        if exchange is None:
            return
        if self._status != 200:
            exchange.fail(f"http_{self._status}", self._body.decode(errors="replace"))
        elif self._reader is None:
            exchange.fail("bad_response", "the answer is no event stream")
        elif not (self._reader.done or exchange.finish_reason):
            exchange.fail("truncated", "the stream ended without [DONE] or a finish_reason")
        self._end()

    def _fail(self, kind: str, detail: str) -> None:
        if self._exchange is not None:
            self._exchange.fail(kind, detail)
            self._end()
        self.close()

    def _end(self) -> None:
        assert self._exchange is not None
        self._exchange.ended = self._now
        self._exchange = None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
