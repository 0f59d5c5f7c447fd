"""The HTTP side over the real wire: the synthetic engine on a thread, ZeroMQ between, sockets in front."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.config import WireConfig, embedded_model
from headrace.gateway.dispatcher import Dispatcher
from headrace.ipc.sockets import GatewaySocket
from headrace.loadtest.synthetic import SyntheticEngine
from headrace.loadtest.synthetic_options import SyntheticOptions
from headrace.loadtest.synthetic_tokens import TokenSource, printable_ids
from tests.gateway.raw import RawClient
from tests.gateway.service import CHAT, Gateway, embedded_text, listening, make_config, parse_events, settle
from tests.gateway.test_streaming import chunks, text_of

URL = "/v1/chat/completions"
TOKENS = printable_ids(embedded_model())
WIRE = WireConfig(heartbeat_s=0.05, dead_after_s=10.0)


def expected_text(seed: int, count: int) -> str:
    """What the engine says to a request of this seed."""
    return embedded_text().decode(TokenSource(TOKENS).sequence(seed, 0, count))


def make_engine(address: str, **options: Any) -> SyntheticEngine:
    settings = {"token_ids": TOKENS, "vocab_size": 4096, "max_model_len": 1 << 15, **options}
    return SyntheticEngine(address, SyntheticOptions(**settings), WIRE)


@asynccontextmanager
async def wired(addresses: list[str], **settings: Any) -> AsyncIterator[Gateway]:
    """A gateway that has found all its engines."""

    def connect(address: str, on_message: Any, on_state: Any) -> GatewaySocket:
        return GatewaySocket(address, "test", WIRE, on_message, on_state)

    config = make_config(**settings)
    dispatcher = Dispatcher(addresses, connect, config.gateway.max_streams)
    async with listening(config, dispatcher) as gateway:
        await settle(lambda: all(link.state == "ready" for link in dispatcher.engines))
        yield gateway


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/engine.sock"


async def test_many_streams_end_with_exactly_their_tokens_in_order(address: str) -> None:
    """Each has its own seed, hence its own text; some ask for choices, some for the answer in one piece."""
    with make_engine(address, tokens_per_row=2):
        async with wired([address], credit_window=32) as gateway:

            async def streamed(seed: int) -> None:
                events = await gateway.events(URL, {**CHAT, "seed": seed, "max_tokens": 101})
                assert text_of(events) == expected_text(seed, 101)
                numbers = [int(event.id) for event in events if event.id]
                assert numbers == sorted(set(numbers))

            async def whole(seed: int) -> None:
                status, answer, _ = await gateway.post(URL, {**CHAT, "seed": seed, "max_tokens": 57})
                assert status == 200
                assert answer["choices"][0]["message"]["content"] == expected_text(seed, 57)
                assert answer["usage"]["completion_tokens"] == 57

            await asyncio.gather(*(streamed(seed) for seed in range(60)), *(map(whole, range(60, 100))))
            assert [link.stats.listener_errors for link in gateway.dispatcher.engines] == [0]


async def test_logprobs_arrive_aligned(address: str) -> None:
    with make_engine(address):
        async with wired([address]) as gateway:
            body = {**CHAT, "seed": 1, "max_tokens": 20, "logprobs": True, "top_logprobs": 3}
            _, answer, _ = await gateway.post(URL, body)
    content = answer["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == expected_text(1, 20)
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in content)


async def test_a_stop_string_stops_the_engine_too(address: str) -> None:
    text = expected_text(3, 200)
    stop = text[300:306]
    with make_engine(address, step_ms=0.5):
        async with wired([address]) as gateway:
            body = {**CHAT, "seed": 3, "max_tokens": 5000, "stop": stop}
            _, answer, _ = await gateway.post(URL, body)
            await settle(lambda: not gateway.dispatcher.num_streams)
    choice = answer["choices"][0]
    assert choice["message"]["content"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    assert answer["usage"]["completion_tokens"] < 200


def load(gateway: Gateway, name: str) -> int:
    """A figure of the engine's newest heartbeat."""
    newest = gateway.dispatcher.engines[0].load
    return int(getattr(newest, name)) if newest else -1


async def test_a_disconnect_frees_the_engine(address: str) -> None:
    with make_engine(address, step_ms=2):
        async with wired([address]) as gateway:
            clients = []
            for _ in range(8):
                client = await RawClient.connect(gateway.port)
                await client.post(URL, {**CHAT, "stream": True, "max_tokens": 10_000})
                await client.reader.readline()
                clients.append(client)
            await settle(lambda: load(gateway, "running") == 8)
            for client in clients:
                client.writer.transport.abort()
            await settle(lambda: load(gateway, "running") == 0 and load(gateway, "blocks_used") == 0)


async def test_a_slow_reader_is_parked_by_the_engine_and_then_gets_everything(address: str) -> None:
    with make_engine(address):
        async with wired([address], credit_window=64) as gateway:
            client = await RawClient.connect(gateway.port, receive_buffer=32 << 10)
            await client.post(URL, {**CHAT, "stream": True, "seed": 9, "max_tokens": 3000})
            await settle(lambda: load(gateway, "parked") == 1)
            assert load(gateway, "output_tokens") < 2000
            status, body = await client.read_response()
            await client.close()
    events = parse_events(body)
    assert status == 200
    assert text_of(events) == expected_text(9, 3000)
    assert chunks(events)[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_full_queue_is_a_429_with_the_engines_words(address: str) -> None:
    with make_engine(address, step_ms=5, max_num_seqs=1, max_waiting=1):
        async with wired([address]) as gateway:
            body = {**CHAT, "max_tokens": 100}
            answers = await asyncio.gather(*(gateway.post(URL, body) for _ in range(6)))
    statuses = sorted(status for status, _, _ in answers)
    assert statuses[0] == 200
    assert statuses[-1] == 429
    refused = next(answer for status, answer, _ in answers if status == 429)
    assert refused["error"]["code"] == "queue_full"


async def test_an_engine_that_vanishes_ends_its_streams_and_the_next_one_serves(address: str) -> None:
    engine = make_engine(address, step_ms=2)
    engine.start()
    async with wired([address]) as gateway:
        reading = asyncio.create_task(gateway.events(URL, {**CHAT, "max_tokens": 10_000}))
        await settle(lambda: load(gateway, "running") == 1)
        engine.kill()
        error = chunks(await reading)[-1]["error"]
        assert error["code"] == "engine_lost"
        status, answer, headers = await gateway.post(URL, CHAT)
        assert (status, answer["error"]["code"], headers["Retry-After"]) == (503, "no_engine", "1")
        with make_engine(address):
            await settle(lambda: gateway.dispatcher.ready)
            status, answer, _ = await gateway.post(URL, {**CHAT, "seed": 5, "max_tokens": 10})
            assert answer["choices"][0]["message"]["content"] == expected_text(5, 10)
