"""Outgoing frames of one WebSocket: those of one engine step leave in one write, straight to the transport.

A transport above its high-water mark makes the socket slow: streams then keep their events in their logs until it
has drained. Knows no stream. ws_session.py owns one per socket.
"""

import asyncio
from collections.abc import Callable

from aiohttp import web

from headrace.gateway.ws_format import frame_bytes


class Outbox:
    """Frames on their way out.

    Args:
        request: of the socket, already upgraded.
        opcode: of every frame.
    """

    def __init__(self, request: web.Request, opcode: int) -> None:
        assert request.transport is not None
        self.slow = False
        self._request = request
        self._transport: asyncio.Transport = request.transport
        self._opcode = opcode
        self._frames: list[bytes] = []
        self._became_slow = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def send(self, payload: bytes) -> None:
        """Queue a frame; it leaves when the event loop is done with what it does now."""
        if not self._frames:
            self._loop.call_soon(self.flush)
        self._frames.append(frame_bytes(self._opcode, payload))

    def flush(self) -> None:
        """Write what is queued, now."""
        if not self._frames:
            return
        data = b"".join(self._frames)
        self._frames.clear()
        if self._transport.is_closing():
            return  # aiohttp ends the handler in a moment
        try:
            self._transport.write(data)
        except (RuntimeError, OSError):  # uvloop raises on a transport that closed within this step
            return
        if self._request.protocol.writing_paused and not self.slow:
            self.slow = True
            self._became_slow.set()

    async def drained(self) -> None:
        """Return when the socket takes more."""
        self.flush()
        if self._request.protocol.writing_paused:
            await self._request.writer.drain()

    async def pump(self, on_drained: Callable[[], None]) -> None:
        """Run as long as the socket: after each slow time, call `on_drained` once the transport is empty enough."""
        while True:
            await self._became_slow.wait()
            self._became_slow.clear()
            await self._request.writer.drain()
            self.slow = False
            on_drained()
