"""The client over WebSocket: shares streams out over sockets, a fixed number on each. Ours only: docs/websocket.md."""

import asyncio
from time import perf_counter

from headrace.loadtest.client import Target
from headrace.loadtest.client_socket import UPGRADE, WsConnection
from headrace.loadtest.exchange import Call, Exchange


class WsClient:
    """Opens a socket whenever all others are full.

    Args:
        target: the server.
        streams: at most so many on one socket; the server allows 256.
    """

    def __init__(self, target: Target, streams: int = 64) -> None:
        self.opened = 0
        self.exchanges: set[Exchange] = set()
        self._target = target
        self._address = target.address()
        self._streams = streams
        self._sockets: list[WsConnection] = []
        self._connecting: set[asyncio.Task[None]] = set()

    async def send(self, exchange: Exchange) -> None:
        exchange.sent = perf_counter()
        self.exchanges.add(exchange)
        socket = self._socket()
        socket.held += 1
        try:
            async with asyncio.timeout(self._target.timeout_s):
                await asyncio.shield(socket.opened)
                await socket.run(exchange, Call(exchange.call.kind, self._target.body(exchange.call)))
        except TimeoutError:
            exchange.fail("timeout", f"no end after {self._target.timeout_s:g} s")
        except OSError as error:
            exchange.fail("connect", str(error))
        finally:
            socket.held -= 1
            exchange.ended = exchange.ended or perf_counter()
            self.exchanges.discard(exchange)

    async def close(self) -> None:
        for socket in self._sockets:
            socket.close()
        await asyncio.gather(*self._connecting, return_exceptions=True)

    def _socket(self) -> WsConnection:
        self._sockets = [socket for socket in self._sockets if not socket.lost]
        for socket in self._sockets:
            if socket.held < self._streams:
                return socket
        socket = WsConnection(self._target.head("GET", "/v1/ws", UPGRADE))
        socket.opened.add_done_callback(_seen)
        self._sockets.append(socket)
        self.opened += 1
        task = asyncio.get_running_loop().create_task(self._connect(socket))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return socket

    async def _connect(self, socket: WsConnection) -> None:
        host, port, context = self._address
        loop = asyncio.get_running_loop()
        try:
            await loop.create_connection(lambda: socket, host, port, ssl=context)
        except OSError as error:
            socket.lost = True
            socket.opened.set_exception(error)


def _seen(opened: asyncio.Future[None]) -> None:
    """Whoever waited has the failure too; nobody may be waiting any more."""
    if not opened.cancelled():
        opened.exception()
