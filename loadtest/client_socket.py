"""One WebSocket of a load test, with many streams on it: docs/websocket.md, JSON frames.

Token frames are told by their first bytes, only the others are parsed. client_ws.py shares the streams out.
"""

import asyncio
import base64
import hashlib
import secrets
from time import perf_counter
from typing import Any, cast

import orjson

from headrace.loadtest.client_frames import CLOSE, PING, PONG, TEXT, FrameParser, client_frame
from headrace.loadtest.client_http import MAX_HEAD, BadResponse, parse_head
from headrace.loadtest.exchange import Call, Exchange

PROTOCOL = "headrace.v1.json"
UPGRADE = (
    "Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
    f"Sec-WebSocket-Protocol: {PROTOCOL}\r\nSec-WebSocket-Key: "
)
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"  # of RFC 6455, section 1.3
_TOKEN = b'{"type":"token","id":"'
_TEXT = b',"text":"'


class WsConnection(asyncio.Protocol):
    """Runs any number of exchanges at once.

    Args:
        head: of the upgrade request, up to the value of Sec-WebSocket-Key.
    """

    def __init__(self, head: bytes) -> None:
        self.held = 0  # streams that client_ws.py has given it
        self.lost = False
        self.opened: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._head = head
        self._key = base64.b64encode(secrets.token_bytes(16))
        self._rest = b""
        self._frames = FrameParser(self._on_frame)
        self._transport: asyncio.Transport | None = None
        self._streams: dict[bytes, tuple[Exchange, asyncio.Future[None]]] = {}
        self._started = 0
        self._now = 0.0

    async def run(self, exchange: Exchange, call: Call) -> None:
        """Start a stream; returns at its end. What goes wrong is written into the exchange."""
        if self.lost or self._transport is None:
            exchange.fail("closed", "the WebSocket was closed")
            return
        self._started += 1
        name = b"%x" % self._started
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._streams[name] = exchange, waiter
        start = {"type": "start", "id": name.decode(), "kind": call.kind, "body": call.body}
        self._send(TEXT, orjson.dumps(start))
        try:
            await waiter
        finally:
            if self._streams.pop(name, None) is not None:  # cancelled or timed out
                self._send(TEXT, orjson.dumps({"type": "cancel", "id": name.decode()}))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(b"%b%b\r\n\r\n" % (self._head, self._key))

    def data_received(self, data: bytes) -> None:
        self._now = perf_counter()
        try:
            if not self.opened.done():
                data = self._handshake(self._rest + data)
            self._frames.feed(data)
        except BadResponse as error:
            self._lose("bad_response", str(error))

    def connection_lost(self, error: Exception | None) -> None:
        self._now = perf_counter()
        self._lose("closed", str(error) if error else "the server closed the WebSocket")

    def _handshake(self, data: bytes) -> bytes:
        """Read the answer to the upgrade; returns what stands behind it."""
        end = data.find(b"\r\n\r\n")
        if end < 0:
            if len(data) > MAX_HEAD:
                raise BadResponse("the head of the answer has no end")
            self._rest = data
            return b""
        status, headers = parse_head(data[:end])
        if status != 101:
            self._lose(f"http_{status}", data[end + 4 :].decode(errors="replace"))
            return b""
        digest = hashlib.sha1(self._key + _GUID, usedforsecurity=False).digest()
        if headers.get("sec-websocket-accept", "") != base64.b64encode(digest).decode():
            raise BadResponse("the server's Sec-WebSocket-Accept does not fit the key")
        self.opened.set_result(None)
        return data[end + 4 :]

    def _on_frame(self, opcode: int, payload: bytes) -> None:
        if payload.startswith(_TOKEN):
            end = payload.find(b'"', len(_TOKEN))
            entry = self._streams.get(payload[len(_TOKEN) : end])
            if entry is None:  # cancelled a moment ago
                return
            exchange = entry[0]
            exchange.arrivals.append(self._now)
            if exchange.keep_text:
                exchange.pieces.append(payload[payload.index(_TEXT, end) + len(_TEXT) : -2])
        elif opcode == TEXT:
            try:
                self._take(orjson.loads(payload))
            except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError):
                text = str(payload[:200], errors="replace")
                raise BadResponse(f"a frame is none of the protocol: {text}") from None
        elif opcode == PING:
            self._send(PONG, payload)
        elif opcode == CLOSE:
            self._lose("closed", f"the server closed the WebSocket with code {int.from_bytes(payload[:2])}")

    def _take(self, frame: dict[str, Any]) -> None:
        name = str(frame.get("id", "")).encode()
        if name not in self._streams:
            if frame["type"] == "error" and "id" not in frame:
                raise BadResponse(f"the server refused a frame: {frame['error']['message']}")
            return
        exchange, _ = self._streams[name]
        if frame["type"] == "error":
            exchange.fail(frame["error"].get("code") or "stream_error", frame["error"]["message"])
            self._end(name)
        elif frame["type"] == "done":
            exchange.finish_reason = frame["finish_reason"]
            exchange.take_usage(frame["usage"])
            self._end(name)

    def _end(self, name: bytes) -> None:
        exchange, waiter = self._streams.pop(name)
        exchange.ended = self._now
        if not waiter.done():
            waiter.set_result(None)

    def _lose(self, kind: str, detail: str) -> None:
        """The socket is of no more use: fail what is on it."""
        self.lost = True
        if not self.opened.done():
            self.opened.set_exception(ConnectionError(f"{kind}: {detail}"))
        for name, (exchange, _) in list(self._streams.items()):
            exchange.fail(kind, detail)
            self._end(name)
        self.close()

    def _send(self, opcode: int, payload: bytes) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(client_frame(opcode, payload))
