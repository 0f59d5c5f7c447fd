"""Raw sockets: slow, huge, broken and half-closed clients, pipelining, and very many of them."""

import asyncio
import json
from contextlib import suppress

import pytest

from tests.gateway.fake_engine import FakeEngine
from tests.gateway.raw import RawClient
from tests.gateway.service import CHAT, say, serving, settle

URL = "/v1/chat/completions"


async def test_headers_that_never_end_are_cut_off() -> None:
    async with serving(header_timeout_s=0.2) as service:
        client = await RawClient.connect(service.port)
        await client.send(b"POST / HTTP/1.1\r\nHost: x\r\n")
        assert await client.read_all() == b""


async def test_a_silent_connection_is_cut_off() -> None:
    async with serving(header_timeout_s=0.2) as service:
        client = await RawClient.connect(service.port)
        assert await client.read_all() == b""


async def test_trickled_headers_are_cut_off_on_a_used_connection_too() -> None:
    """One byte at a time, after a first proper request."""
    async with serving(header_timeout_s=0.3) as service:
        client = await RawClient.connect(service.port)
        await client.post(URL, CHAT)
        assert (await client.read_response())[0] == 200

        async def trickle() -> None:
            for byte in b"GET /v1/models HTTP/1.1\r\nX: " + b"a" * 10_000:
                await client.send(bytes([byte]))
                await asyncio.sleep(0.02)

        trickling = asyncio.create_task(trickle())
        with suppress(ConnectionError):
            assert await asyncio.wait_for(client.reader.read(-1), 10) == b""
        trickling.cancel()
        await asyncio.gather(trickling, return_exceptions=True)
        await client.close()


async def test_an_idle_connection_outlives_the_header_timeout() -> None:
    """Clients keep connections in pools; only a begun request is hurried."""
    async with serving(header_timeout_s=0.1) as service:
        client = await RawClient.connect(service.port)
        await client.post(URL, CHAT)
        await client.read_response()
        await asyncio.sleep(0.3)
        await client.post(URL, CHAT)
        assert (await client.read_response())[0] == 200
        await client.close()


async def test_a_long_answer_outlives_the_header_timeout() -> None:
    async with serving(engine=FakeEngine(say("fox " * 10), step_s=0.03), header_timeout_s=0.1) as service:
        client = await RawClient.connect(service.port)
        await client.post(URL, {**CHAT, "stream": True})
        assert (await client.read_response())[0] == 200
        await client.close()


async def test_a_body_that_never_comes_is_a_408() -> None:
    async with serving(body_timeout_s=0.2) as service:
        client = await RawClient.connect(service.port)
        await client.send(f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{{".encode())
        status, body = await client.read_response()
        assert status == 408
        assert json.loads(body)["error"]["code"] == "body_timeout"
        assert await client.reader.read(-1) == b"", "and the connection is closed"
        await client.close()


async def test_a_huge_body_is_refused_before_it_is_sent() -> None:
    async with serving(max_body_bytes=4096) as service:
        client = await RawClient.connect(service.port)
        await client.send(f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000000\r\n\r\n".encode())
        status, body = await client.read_response()
        assert status == 413
        assert "10000000000 bytes, the limit is 4096" in json.loads(body)["error"]["message"]
        await client.close()


async def test_an_endless_chunked_body_is_refused_at_the_limit() -> None:
    async with serving(max_body_bytes=100_000) as service:
        client = await RawClient.connect(service.port)
        await client.send(f"POST {URL} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode())
        chunk = b"4000\r\n" + b" " * 0x4000 + b"\r\n"

        async def pour() -> None:
            while True:
                await client.send(chunk)

        pouring = asyncio.create_task(pour())
        status, _ = await client.read_response()
        assert status == 413
        pouring.cancel()
        await asyncio.gather(pouring, return_exceptions=True)
        await client.close()


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GARBAGE\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"GET / HTTP/1.1\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nA: " + b"x" * 20_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 20_000 + b" HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"".join(b"H%d: x\r\n" % i for i in range(500)) + b"\r\n",
        b"GET / HTTP/1.1\r\nBad Header: x\r\n\r\n",
    ],
    ids=["tls", "garbage", "version", "length", "smuggling", "field", "line", "count", "name"],
)
async def test_malformed_requests_get_a_400_and_are_closed(request_bytes: bytes) -> None:
    async with serving() as service:
        client = await RawClient.connect(service.port)
        await client.send(request_bytes)
        data = await client.read_all()
        head, _, body = data.partition(b"\r\n\r\n")
        assert b" 400 " in head.split(b"\r\n")[0]
        assert json.loads(body)["error"]["code"] == "bad_http"
        await settle(lambda: not service.connections())


async def test_a_client_that_waits_for_100_continue_gets_it() -> None:
    """curl does for bodies above 1 MiB."""
    body = json.dumps(CHAT).encode()
    async with serving() as service:
        client = await RawClient.connect(service.port)
        head = (
            f"POST {URL} HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        await client.send(head.encode())
        assert await client.reader.readline() == b"HTTP/1.1 100 Continue\r\n"
        assert await client.reader.readline() == b"\r\n"
        await client.send(body)
        assert (await client.read_response())[0] == 200
        await client.close()


async def test_a_half_closed_client_counts_as_gone() -> None:
    engine = FakeEngine(say("fox " * 200), step_s=0.01)
    async with serving(engine=engine) as service:
        client = await RawClient.connect(service.port)
        await client.post(URL, {**CHAT, "stream": True})
        assert (await client.reader.readline()).startswith(b"HTTP/1.1 200")
        client.writer.write_eof()
        await asyncio.wait_for(engine.cancelled.wait(), 10)
        await client.reader.read(-1)
        await client.close()


async def test_a_client_that_resets_in_the_middle_of_a_stream_harms_nobody() -> None:
    engine = FakeEngine(say("fox " * 60), step_s=0.005)
    async with serving(engine=engine) as service:
        other = asyncio.create_task(service.events(URL, CHAT))
        client = await RawClient.connect(service.port)
        await client.post(URL, {**CHAT, "stream": True})
        await client.reader.readline()
        client.writer.transport.abort()
        await asyncio.wait_for(engine.cancelled.wait(), 10)
        events = await other
        assert events[-1].data == "[DONE]"


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving(say("Hi")) as service:
        client = await RawClient.connect(service.port)
        bodies = [json.dumps({**CHAT, "max_tokens": n}).encode() for n in (1, 5, 0)]
        await client.send(
            b"".join(
                f"POST {URL} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
                for body in bodies
            )
        )
        answers = [await client.read_response() for _ in bodies]
        await client.close()
    assert [status for status, _ in answers] == [200, 200, 400]
    assert json.loads(answers[0][1])["choices"][0]["finish_reason"] == "length"


async def test_a_thousand_connects_leave_nothing_behind() -> None:
    """Half of them leave at once, some after half a request; then the service still answers."""
    async with serving() as service:
        for start in range(0, 1000, 250):
            clients = [await RawClient.connect(service.port) for _ in range(250)]
            for i, client in enumerate(clients):
                if (start + i) % 2:
                    await client.send(b"POST /v1/chat/completions HTTP/1.1\r\nContent-Length: 50\r\n")
            for client in clients:
                client.writer.transport.abort()
        await settle(lambda: not service.connections())
        status, _, _ = await service.post(URL, CHAT)
        assert status == 200


async def test_many_streams_at_once_end_with_every_token_in_order() -> None:
    engine = FakeEngine(say("Once upon a time there was a fox. " * 4))
    async with serving(engine=engine) as service:
        results = await asyncio.gather(*(service.events(URL, CHAT) for _ in range(100)))
    for events in results:
        numbers = [int(event.id) for event in events if event.id]
        assert numbers == list(range(1, len(numbers) + 1))
        assert events[-1].data == "[DONE]"
