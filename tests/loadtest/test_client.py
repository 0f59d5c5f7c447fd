"""The load generator's HTTP client against scripted servers: whatever they say, however it is cut."""

import asyncio
from time import perf_counter

import pytest

from headrace.loadtest.client import SseClient, Target
from headrace.loadtest.client_http import COMPLETE, BadResponse, ResponseParser
from headrace.loadtest.client_sse import SseReader
from headrace.loadtest.exchange import Call, Exchange
from tests.loadtest.server import (
    DONE,
    HEAD,
    Script,
    chunked,
    event,
    plain,
    read_request,
    saying,
    serving,
    usage,
)

CALL = Call("chat", {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3})
ANSWER = (
    event("", None),
    event("One"),
    event(' "two"\n'),
    event(" drei \u00e9\U0001f600"),
    event("", "length"),
    usage(9, 3, cached=4),
    DONE,
)


async def ask(script: Script, timeout_s: float = 30.0, times: int = 1) -> tuple[list[Exchange], SseClient]:
    async with serving(script) as url:
        client = SseClient(Target(url=url, model="m", timeout_s=timeout_s))
        exchanges = []
        for _ in range(times):
            exchange = Exchange(CALL, perf_counter(), keep_text=True)
            await client.send(exchange)
            exchanges.append(exchange)
        await client.close()
        return exchanges, client


@pytest.mark.parametrize("piece", [0, 1, 7, 64])
async def test_an_answer_is_read_however_the_network_cuts_it(piece: int) -> None:
    (exchange,), _ = await ask(saying(HEAD + chunked(*ANSWER), piece))
    assert (exchange.error, exchange.detail) == ("", "")
    assert len(exchange.arrivals) == 3
    assert exchange.text() == 'One "two"\n drei \u00e9\U0001f600'
    assert (exchange.prompt_tokens, exchange.output_tokens, exchange.cached_tokens) == (9, 3, 4)
    assert exchange.finish_reason == "length"
    assert (
        exchange.intended <= exchange.sent <= exchange.arrivals[0] <= exchange.arrivals[-1] <= exchange.ended
    )


@pytest.mark.parametrize("joined", [True, False], ids=["one chunk", "a chunk each"])
async def test_events_that_share_a_chunk_are_counted_one_by_one(joined: bool) -> None:
    answer = [b"".join(ANSWER)] if joined else list(ANSWER)
    (exchange,), _ = await ask(saying(HEAD + chunked(*answer)))
    assert len(exchange.arrivals) == 3


async def test_a_connection_is_used_again() -> None:
    exchanges, client = await ask(saying(HEAD + chunked(*ANSWER)), times=3)
    assert [exchange.error for exchange in exchanges] == ["", "", ""]
    assert client.opened == 1


async def test_a_connection_that_the_server_ends_is_not() -> None:
    head = HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n")
    exchanges, client = await ask(saying(head + chunked(*ANSWER)), times=2)
    assert [exchange.error for exchange in exchanges] == ["", ""]
    assert client.opened == 2


async def test_a_body_without_length_ends_with_the_connection() -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(head + b"".join(ANSWER))

    (exchange,), _ = await ask(script)
    assert (exchange.error, len(exchange.arrivals)) == ("", 3)


@pytest.mark.parametrize(
    ("response", "kind", "says"),
    [
        (plain(429, b'{"error":{"message":"busy"}}'), "http_429", "busy"),
        (plain(200, b"{}"), "bad_response", "no event stream"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", "bad_response", "not an HTTP/1.1 response"),
        (HEAD + b"zz\r\n", "bad_response", "a chunk's size is"),
        (HEAD + b"3\r\nabcdef\r\n", "bad_response", "longer than announced"),
        (HEAD + chunked(b"data: {nonsense\n\n"), "bad_response", "no JSON"),
        (HEAD + chunked(b'data: {"choices": [{"delta": 7}]}\n\n'), "bad_response", "no chunk of an answer"),
        (HEAD + chunked(event("One")), "truncated", "without [DONE]"),
        (
            HEAD + chunked(b'data: {"error": {"message": "the engine died"}}\n\n', DONE),
            "stream_error",
            "died",
        ),
    ],
    ids=["429", "json", "ssh", "chunk size", "chunk length", "nonsense", "shape", "truncated", "error event"],
)
async def test_what_is_wrong_with_an_answer_is_named(response: bytes, kind: str, says: str) -> None:
    (exchange,), _ = await ask(saying(response))
    assert exchange.error == kind
    assert says in exchange.detail


async def test_a_server_that_hangs_up_is_named() -> None:
    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(HEAD + b"%x\r\n" % 500 + event("One"))

    (exchange,), _ = await ask(script)
    assert exchange.error == "closed"


async def test_a_server_that_says_nothing_times_out() -> None:
    async def script(reader: asyncio.StreamReader, _writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        await reader.read()

    (exchange,), _ = await ask(script, timeout_s=0.05)
    assert exchange.error == "timeout"
    assert exchange.ended > exchange.sent


async def test_nobody_listening_is_named() -> None:
    client = SseClient(Target(url="http://127.0.0.1:1", model="m"))
    exchange = Exchange(CALL, perf_counter())
    await client.send(exchange)
    assert exchange.error == "connect"


def read(*payloads: bytes, keep_text: bool = True) -> Exchange:
    exchange = Exchange(CALL, 0.0, keep_text=keep_text)
    reader = SseReader(exchange)
    for now, payload in enumerate(payloads, 1):
        reader.feed(payload, float(now))
    return exchange


def test_ids_comments_and_other_line_ends_are_understood() -> None:
    stream = (
        b": hello\n\nid: 1\n" + event("a") + b"id: 2\n" + event("b") + b": keep-alive\n\nid: 3\n" + event("c")
    )
    assert read(stream).text() == "abc"
    assert read(*(bytes((byte,)) for byte in stream.replace(b"\n", b"\r\n"))).text() == "abc"


def test_completions_and_reasoning_count_as_text() -> None:
    completion = [b'data: {"choices": [{"text": "%d", "index": 0}]}\n\n' % i for i in range(3)]
    reasoning = [b'data: {"choices":[{"delta":{"reasoning_content":"%d"}}]}\n\n' % i for i in range(3)]
    assert read(*completion, *reasoning, event("x")).text() == "012012x"


def test_an_event_that_only_looks_like_a_token_is_not_one() -> None:
    """Empty text, a finish reason, usage: each is read, though begun like the events before."""
    exchange = read(
        event("a"), event("b"), event(""), event("c", "stop"), event("d", usage={"completion_tokens": 7})
    )
    assert list(exchange.arrivals) == [1.0, 2.0, 4.0, 5.0]
    assert (exchange.finish_reason, exchange.output_tokens) == ("stop", 7)


def test_events_of_ever_new_shape_are_still_counted() -> None:
    exchange = read(*(event(f"{i} ", created=i) for i in range(50)))
    assert exchange.text() == "".join(f"{i} " for i in range(50))


def test_an_event_without_end_is_refused() -> None:
    reader = SseReader(Exchange(CALL, 0.0))
    with pytest.raises(BadResponse, match="longer than"):
        for _ in range(9):
            reader.feed(b"x" * (1 << 20), 0.0)


def test_trailers_informational_heads_and_chunk_extensions_are_skipped() -> None:
    seen: list[bytes] = []
    statuses: list[int] = []
    parser = ResponseParser(lambda status, _headers: statuses.append(status), seen.append)
    parser.begin()
    parser.feed(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n")
    parser.feed(b"3;name=value\r\nabc\r\n0\r\nX-Trailer: 1\r\n\r\n")
    assert (statuses, seen, parser.state) == ([200], [b"abc"], COMPLETE)
    with pytest.raises(BadResponse, match="more than the response"):
        parser.feed(b"HTTP/1.1 200 OK\r\n")
