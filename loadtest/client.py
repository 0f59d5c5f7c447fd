"""The client of a load test: sends calls to an OpenAI-compatible server, each on a connection that is free.

Knows nothing of load or figures. A connection is an asyncio.Protocol of ours, because per event a general client
costs more than the servers under test.
"""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol
from urllib.parse import urlsplit

import orjson

from headrace.config import ConfigError
from headrace.loadtest.client_connection import HttpConnection
from headrace.loadtest.exchange import Call, Exchange, Kind

PATHS: dict[Kind, str] = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The server under test."""

    url: str  # http://host:port, a path in front of /v1 allowed
    model: str
    api_key: str = ""
    timeout_s: float = 600.0  # of one request, connecting included

    def address(self) -> tuple[str, int, ssl.SSLContext | None]:
        """Host, port, and TLS if the URL asks for it.

        Raises:
            ConfigError: it is no http URL.
        """
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {self.url}: give http://HOST:PORT")
        secure = parts.scheme == "https"
        context = ssl.create_default_context() if secure else None
        return parts.hostname, parts.port or (443 if secure else 80), context

    def head(self, method: str, path: str, extra: str = "") -> bytes:
        """Request line and headers up to the last, which the caller adds."""
        parts = urlsplit(self.url)
        base = parts.path.rstrip("/").removesuffix("/v1")
        key = f"Authorization: Bearer {self.api_key}\r\n" if self.api_key else ""
        line = f"{method} {base}{path} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        return f"{line}User-Agent: headrace-loadtest\r\n{key}{extra}".encode()

    def body(self, call: Call) -> dict[str, Any]:
        """What the API is sent, but for the streaming fields."""
        return {"model": self.model, **call.body}


class Client(Protocol):
    """Either transport."""

    opened: int  # connections so far
    exchanges: set[Exchange]  # open

    async def send(self, exchange: Exchange) -> None:
        """Send the call and wait for the end of its answer; what goes wrong is written into the exchange."""

    async def close(self) -> None:
        """Close the connections; open exchanges fail."""


class SseClient:
    """Streams over HTTP/1.1, one request at a time on a connection, connections kept and reused."""

    def __init__(self, target: Target) -> None:
        self.opened = 0
        self.exchanges: set[Exchange] = set()
        self._target = target
        self._address = target.address()
        self._heads = {
            kind: target.head("POST", path, "Content-Type: application/json\r\nContent-Length: ")
            for kind, path in PATHS.items()
        }
        self._idle: list[HttpConnection] = []

    async def send(self, exchange: Exchange) -> None:
        exchange.sent = perf_counter()
        self.exchanges.add(exchange)
        connection: HttpConnection | None = None
        try:
            async with asyncio.timeout(self._target.timeout_s):
                connection = await self._connection()
                await connection.run(exchange, self._request(exchange.call))
        except TimeoutError:
            exchange.fail("timeout", f"no end after {self._target.timeout_s:g} s")
        except OSError as error:
            exchange.fail("connect", str(error))
        finally:
            exchange.ended = exchange.ended or perf_counter()
            self.exchanges.discard(exchange)
            self._release(connection)

    async def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _request(self, call: Call) -> bytes:
        fields = self._target.body(call)
        body = orjson.dumps({**fields, "stream": True, "stream_options": {"include_usage": True}})
        return b"%b%d\r\n\r\n%b" % (self._heads[call.kind], len(body), body)

    async def _connection(self) -> HttpConnection:
        while self._idle:
            connection = self._idle.pop()
            if connection.reusable:
                return connection
        return await self._connect()

    async def _connect(self) -> HttpConnection:
        host, port, context = self._address
        self.opened += 1
        loop = asyncio.get_running_loop()
        make: Callable[[], HttpConnection] = HttpConnection
        _, connection = await loop.create_connection(make, host, port, ssl=context)
        return connection

    def _release(self, connection: HttpConnection | None) -> None:
        if connection is None:
            return
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
