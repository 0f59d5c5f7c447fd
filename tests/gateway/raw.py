"""An HTTP client of bytes: for hostile input, half-closed sockets, and readers that do not read."""

import asyncio
import json
import socket
from contextlib import suppress
from typing import Any


class RawClient:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @staticmethod
    async def connect(port: int, receive_buffer: int = 0) -> "RawClient":
        """Connect; with `receive_buffer`, neither the kernel nor asyncio reads far ahead of the test."""
        raw = socket.socket()
        if receive_buffer:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        raw.setblocking(False)
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", port))
        limit = receive_buffer or 1 << 16
        return RawClient(*await asyncio.open_connection(sock=raw, limit=limit))

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def post(self, path: str, body: Any, version: str = "1.1") -> None:
        payload = json.dumps(body).encode()
        head = f"POST {path} HTTP/{version}\r\nHost: x\r\nContent-Length: {len(payload)}\r\n\r\n"
        await self.send(head.encode() + payload)

    async def read_all(self) -> bytes:
        """Everything until the server closes."""
        data = await self.reader.read(-1)
        await self.close()
        return data

    async def read_response(self) -> tuple[int, bytes]:
        """One response: status and body."""
        status, headers = await self._head()
        if headers.get("transfer-encoding") == "chunked":
            return status, b"".join(await self._chunks())
        return status, await self.reader.readexactly(int(headers.get("content-length", 0)))

    async def read_chunks(self) -> list[bytes]:
        """The chunks of a response, as they were sent."""
        _, headers = await self._head()
        assert headers["transfer-encoding"] == "chunked"
        return await self._chunks()

    async def _head(self) -> tuple[int, dict[str, str]]:
        status = int((await self._line()).split()[1])
        headers = {}
        while line := await self._line():
            name, _, value = line.decode().partition(":")
            headers[name.lower()] = value.strip()
        return status, headers

    async def _chunks(self) -> list[bytes]:
        """By the rules of RFC 9112, section 7.1."""
        chunks = []
        while size := int(await self._line(), 16):
            chunks.append(await self.reader.readexactly(size))
            assert await self._line() == b""
        assert await self._line() == b""
        return chunks

    async def close(self) -> None:
        self.writer.close()
        with suppress(ConnectionError):
            await self.writer.wait_closed()

    async def _line(self) -> bytes:
        line = await self.reader.readline()
        assert line.endswith(b"\r\n"), line
        return line[:-2]
