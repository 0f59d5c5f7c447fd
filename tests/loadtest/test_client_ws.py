"""The WebSocket client: frames cut anywhere, and what a server may do to it."""

import asyncio
import base64
import hashlib
from time import perf_counter

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.loadtest.client import Target
from headrace.loadtest.client_frames import FrameParser, client_frame
from headrace.loadtest.client_http import BadResponse
from headrace.loadtest.client_ws import WsClient
from headrace.loadtest.exchange import Call, Exchange
from tests.loadtest.server import Script, plain, saying, serving

CALL = Call("chat", {"messages": [], "max_tokens": 2})


def server_frame(payload: bytes, opcode: int = 1) -> bytes:
    size = len(payload)
    if size < 126:
        return bytes((0x80 | opcode, size)) + payload
    return (
        bytes((0x80 | opcode, 126)) + size.to_bytes(2) + payload
        if size < 1 << 16
        else (bytes((0x80 | opcode, 127)) + size.to_bytes(8) + payload)
    )


@given(st.lists(st.sampled_from([0, 1, 125, 126, 300, 70000]), max_size=4), st.sampled_from([3, 100, 5000]))
@settings(deadline=None, max_examples=40)
def test_frames_are_cut_out_of_any_pieces(sizes: list[int], piece: int) -> None:
    stream = b"".join(server_frame(b"x" * size) for size in sizes)
    found: list[bytes] = []
    parser = FrameParser(lambda _opcode, payload: found.append(payload))
    for at in range(0, len(stream), piece):
        parser.feed(stream[at : at + piece])
    assert [len(payload) for payload in found] == sizes


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\x81\xfe\0\0", "masked"),
        (b"\x01\x01a", "fragmented"),
        (b"\xc1\x01a", "extension"),
        (b"\x81\x7f\x7f" + b"\xff" * 7, "bytes is announced"),
    ],
    ids=["masked", "fragment", "reserved bit", "endless"],
)
def test_frames_that_no_server_may_send_are_refused(data: bytes, says: str) -> None:
    with pytest.raises(BadResponse, match=says):
        FrameParser(lambda _opcode, _payload: None).feed(data)


async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    head = await reader.readuntil(b"\r\n\r\n")
    key = next(
        line.partition(b": ")[2] for line in head.split(b"\r\n") if line.startswith(b"Sec-WebSocket-Key")
    )
    digest = hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest()
    writer.write(
        b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        b"Sec-WebSocket-Accept: %b\r\n\r\n" % base64.b64encode(digest)
    )


async def read_frame(reader: asyncio.StreamReader) -> dict[str, object]:
    head = await reader.readexactly(2)
    size = head[1] & 0x7F
    if size == 126:
        size = int.from_bytes(await reader.readexactly(2))
    await reader.readexactly(4)
    frame: dict[str, object] = orjson.loads(await reader.readexactly(size))
    return frame


async def ask(
    script: Script, num: int = 1, streams: int = 64, timeout_s: float = 30.0
) -> tuple[list[Exchange], int]:
    async with serving(script) as url:
        client = WsClient(Target(url=url, model="m", timeout_s=timeout_s), streams)
        exchanges = [Exchange(CALL, perf_counter(), keep_text=True) for _ in range(num)]
        await asyncio.gather(*(client.send(exchange) for exchange in exchanges))
        await client.close()
        return exchanges, client.opened


async def answer_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Two tokens and a done for each stream, in one write, with a ping between."""
    await accept(reader, writer)
    while True:
        try:
            start = await read_frame(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            return
        name = start["id"]
        frames = [
            {"type": "started", "request_id": "r", "model": "m", "choices": 1, "id": name},
            {"type": "token", "id": name, "index": 0, "seq": 1, "text": 'a"'},
            {"type": "token", "id": name, "index": 0, "seq": 2, "text": "\u00e9"},
        ]
        done = {
            "type": "done",
            "index": 0,
            "seq": 3,
            "finish_reason": "length",
            "stop_reason": None,
            "id": name,
        }
        usage = {"prompt_tokens": 5, "completion_tokens": 2}
        writer.write(b"".join(server_frame(orjson.dumps(frame)) for frame in frames))
        writer.write(server_frame(orjson.dumps({**done, "usage": usage})))


async def test_streams_share_sockets_and_each_gets_its_own_answer() -> None:
    exchanges, opened = await ask(answer_all, num=5, streams=2)
    assert opened == 3
    for exchange in exchanges:
        assert (exchange.error, exchange.text(), exchange.tokens) == ("", 'a"\u00e9', 2)
        assert len(exchange.arrivals) == 2


async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await accept(reader, writer)
    name = (await read_frame(reader))["id"]
    error = {"message": "queue_full: 8 wait", "type": "rate_limit", "param": None, "code": "queue_full"}
    writer.write(server_frame(orjson.dumps({"type": "error", "id": name, "error": error})))
    await reader.read()


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await accept(reader, writer)
    await read_frame(reader)
    writer.write(server_frame((1001).to_bytes(2), opcode=8))


async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await accept(reader, writer)
    await read_frame(reader)
    writer.write(server_frame(b"[]"))
    await reader.read()


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (refuse, "queue_full"),
        (hang_up, "closed"),
        (babble, "bad_response"),
        (saying(plain(401, b"no key")), "connect"),
    ],
    ids=["refuse", "hang up", "babble", "401"],
)
async def test_what_goes_wrong_is_named(script: Script, kind: str) -> None:
    (exchange,), _ = await ask(script)
    assert exchange.error == kind
    assert exchange.ended >= exchange.sent


async def test_a_stream_that_times_out_is_cancelled_at_the_server() -> None:
    cancelled = asyncio.Event()

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await accept(reader, writer)
        await read_frame(reader)
        if (await read_frame(reader))["type"] == "cancel":
            cancelled.set()

    async with serving(script) as url:
        client = WsClient(Target(url=url, model="m", timeout_s=0.05))
        exchange = Exchange(CALL, perf_counter())
        await client.send(exchange)
        assert exchange.error == "timeout"
        await cancelled.wait()
        await client.close()


def test_a_frame_of_ours_says_its_length_in_the_shortest_form() -> None:
    assert client_frame(1, b"ab") == b"\x81\x82\0\0\0\0ab"
    assert client_frame(1, b"x" * 126)[:4] == b"\x81\xfe\0\x7e"
    assert client_frame(1, b"x" * 70000)[:10] == b"\x81\xff" + (70000).to_bytes(8)
