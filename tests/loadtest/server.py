"""A server that says exactly what a test wants, byte by byte: scripts for the load generator's client."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import orjson

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)
Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def event(text: str, reason: str | None = None, **more: object) -> bytes:
    """A chat chunk as vLLM writes it."""
    choice = {"index": 0, "delta": {"content": text}, "logprobs": None, "finish_reason": reason}
    chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "model": "m", "choices": [choice], **more}
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def usage(prompt: int, output: int, cached: int = 0) -> bytes:
    found = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return b"data: " + orjson.dumps({"id": "chatcmpl-1", "choices": [], "usage": found}) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def chunked(*payloads: bytes) -> bytes:
    """The body of a chunked response, its last chunk included."""
    return b"".join(b"%x\r\n%b\r\n" % (len(payload), payload) for payload in payloads) + b"0\r\n\r\n"


def plain(status: int, body: bytes) -> bytes:
    return b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


def saying(response: bytes, piece: int = 0) -> Script:
    """Answers every request on the connection with these bytes, `piece` of them at a time."""

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await read_request(reader):
            step = piece or len(response)
            for at in range(0, len(response), step):
                writer.write(response[at : at + step])
                await writer.drain()
                if piece:
                    await asyncio.sleep(0)

    return script


async def read_request(reader: asyncio.StreamReader) -> bytes:
    """Head and body of one request; empty at the connection's end."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""
    size = next(
        (
            int(line.partition(b":")[2])
            for line in head.split(b"\r\n")
            if line.lower().startswith(b"content-length")
        ),
        0,
    )
    return head + await reader.readexactly(size)


@asynccontextmanager
async def serving(script: Script) -> AsyncIterator[str]:
    """The URL of a server that runs the script on each connection."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await script(reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()
