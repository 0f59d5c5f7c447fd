"""The gateway's end: it finds its engine, loses it, finds it again, and hears every frame in order."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import zmq

from headrace.config import ConfigError, WireConfig
from headrace.ipc import gateway_socket
from headrace.ipc.codec import MalformedFrame, encode
from headrace.ipc.engine_socket import EngineSocket
from headrace.ipc.gateway_socket import GatewaySocket
from headrace.ipc.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Goodbye,
    Hello,
    Load,
    Ping,
    Refused,
    Rejected,
    ToEngine,
    ToGateway,
    Tokens,
    Welcome,
)
from tests.ipc.peers import RawEngine, raw_engine
from tests.ipc.samples import LOAD, SUBMIT, TOKENS, WELCOME, WIRE
from tests.ipc.test_corpus import corpus

TIMEOUT_S = 10.0


class Gateway:
    """A GatewaySocket and what it has called back with."""

    def __init__(self, address: str, wire: WireConfig = WIRE, **changes: Any) -> None:
        self.messages: list[ToGateway] = []
        self.states: list[tuple[str, str]] = []
        self.states_at_first_message: list[tuple[str, str]] | None = None
        self._news = asyncio.Event()
        self.socket = GatewaySocket(address, "gateway-0", wire, self.on_message, self.on_state, **changes)

    def on_message(self, message: ToGateway) -> None:
        if not self.messages:
            self.states_at_first_message = list(self.states)
        self.messages.append(message)
        self._news.set()

    def on_state(self, state: str, reason: str) -> None:
        assert (state, reason) == (self.socket.state, self.socket.reason)
        self.states.append((state, reason))
        self._news.set()

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until it holds; checked after every callback."""
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def until_state(self, state: str) -> None:
        await self.until(lambda: self.socket.state == state)

    async def until_tokens(self, count: int) -> None:
        await self.until(lambda: len(self.of(Tokens)) >= count)

    def of(self, kind: type) -> list[Any]:
        return [message for message in self.messages if isinstance(message, kind)]


@pytest.fixture
async def make_gateway(address: str) -> AsyncIterator[Callable[..., Gateway]]:
    """Started gateways; closed at the end."""
    made: list[Gateway] = []

    def make(at: str = address, **changes: Any) -> Gateway:
        gateway = Gateway(at, **changes)
        made.append(gateway)
        gateway.socket.start()
        return gateway

    yield make
    for gateway in made:
        gateway.socket.close()


MakeGateway = Callable[..., Gateway]


class Served:
    """An engine on a thread that answers Submit with Tokens and beats."""

    def __init__(self, address: str, **changes: Any) -> None:
        self.socket = EngineSocket(
            address, changes.pop("welcome", WELCOME), changes.pop("wire", WIRE), **changes
        )
        self.received: list[ToEngine] = []
        self.heard_something = threading.Event()
        self.load = LOAD
        self._end = threading.Event()
        self._goodbye = True
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._end.is_set():
            for gateway, message in self.socket.receive(0.01):
                self.received.append(message)
                self.heard_something.set()
                self.socket.send(gateway, TOKENS)
            if self.socket.load_due:
                self.socket.send_load(self.load)
        self.socket.close(goodbye=self._goodbye)

    def stop(self, *, goodbye: bool = True) -> None:
        self._goodbye = goodbye
        self._end.set()
        self._thread.join()


@contextmanager
def served(address: str, **changes: Any) -> Iterator[Served]:
    engine = Served(address, **changes)
    try:
        yield engine
    finally:
        engine.stop()


async def greet(engine: RawEngine) -> bytes:
    """Answer the next Hello of a raw engine; the gateway's routing id."""
    while True:
        peer, message = await asyncio.to_thread(engine.hear)
        if isinstance(message, Hello):
            engine.say(peer, WELCOME)
            return peer


async def test_welcome_comes_before_ready(address: str, make_gateway: MakeGateway) -> None:
    with raw_engine(address) as engine:
        gateway = make_gateway()
        peer, _ = await asyncio.to_thread(engine.hear)
        engine.say(peer, WELCOME, LOAD)
        await gateway.until(lambda: gateway.messages)
        assert gateway.states_at_first_message == []
        await gateway.until_state("ready")
        assert gateway.socket.welcome == WELCOME


async def test_a_gateway_that_starts_first_waits_for_its_engine(
    address: str, make_gateway: MakeGateway
) -> None:
    gateway = make_gateway()
    assert gateway.socket.state == "connecting"
    assert not gateway.socket.send(SUBMIT)
    with served(address) as engine:
        await gateway.until_state("ready")
        assert gateway.socket.send(SUBMIT)
        await gateway.until(lambda: gateway.of(Tokens))
        assert engine.received == [SUBMIT]
        await gateway.until(lambda: gateway.of(Load))


@pytest.mark.parametrize("count", [1, 63, 64, 65, 5000])
async def test_a_burst_arrives_whole_and_in_order(
    address: str, make_gateway: MakeGateway, count: int
) -> None:
    """The descriptor tells once that there is something; what one wake-up leaves must not wait for the next."""
    with raw_engine(address) as engine:
        gateway = make_gateway()
        peer = await greet(engine)
        await gateway.until_state("ready")
        engine.say(peer, *[replace(TOKENS, step=step) for step in range(count)])
        await gateway.until(lambda: len(gateway.of(Tokens)) == count)
    assert [tokens.step for tokens in gateway.of(Tokens)] == list(range(count))


async def test_sending_does_not_swallow_the_news_of_an_answer(
    address: str, make_gateway: MakeGateway
) -> None:
    """Each send may clear the edge of the descriptor; a thousand exchanges would hang sooner or later."""
    with served(address, wire=replace(WIRE, heartbeat_s=20.0)):
        gateway = make_gateway(wire=replace(WIRE, heartbeat_s=20.0))
        await gateway.until_state("ready")
        for count in range(1, 1001):
            assert gateway.socket.send(SUBMIT)
            if count % 3 == 0:
                assert gateway.socket.send(Cancel(1))
            await gateway.until_tokens(count)


async def test_a_burst_does_not_hold_up_the_loop(address: str, make_gateway: MakeGateway) -> None:
    """Others get their turn between batches."""
    with raw_engine(address) as engine:
        gateway = make_gateway()
        peer = await greet(engine)
        await gateway.until_state("ready")
        turns: list[int] = []
        engine.say(peer, *[replace(TOKENS, step=step) for step in range(2000)])
        while len(gateway.of(Tokens)) < 2000:
            await asyncio.sleep(0)
            turns.append(len(gateway.messages))
    batches = [after - before for before, after in pairwise(turns)]
    # One batch from the descriptor and one that follows it may share a turn of the loop.
    assert max(batches) <= 3 * gateway_socket.MAX_FRAMES_PER_WAKE


@pytest.mark.parametrize(
    ("changes", "reason"),
    [({"fingerprint": "other"}, "fingerprint: "), ({}, "version: ")],
)
async def test_a_refusal_is_told_with_its_reason_and_tried_again(
    address: str, make_gateway: MakeGateway, changes: dict[str, str], reason: str
) -> None:
    with raw_engine(address) as engine:
        gateway = make_gateway(**changes)
        peer, hello = await asyncio.to_thread(engine.hear)
        assert hello == Hello(PROTOCOL_VERSION, "gateway-0", changes.get("fingerprint", ""))
        engine.say(peer, Refused(reason[:-2], "as it is"))
        await gateway.until_state("refused")
        assert gateway.socket.reason == f"{reason}as it is"
        assert not gateway.socket.send(SUBMIT)
        await greet(engine)
        await gateway.until_state("ready")


async def test_an_engine_of_another_version_is_refused_by_the_gateway(
    address: str, make_gateway: MakeGateway
) -> None:
    with raw_engine(address) as engine:
        gateway = make_gateway()
        peer, _ = await asyncio.to_thread(engine.hear)
        engine.say(peer, replace(WELCOME, version=99))
        await gateway.until_state("refused")
    assert "version 99" in gateway.socket.reason
    assert gateway.messages == []


async def test_a_killed_engine_is_lost_and_its_successor_found(
    address: str, make_gateway: MakeGateway
) -> None:
    """Without a goodbye; the heartbeats would take 30 s, the broken connection tells at once."""
    engine = Served(address)
    gateway = make_gateway()
    await gateway.until_state("ready")
    engine.stop(goodbye=False)
    await gateway.until_state("lost")
    assert gateway.socket.welcome is None
    assert not gateway.socket.send(SUBMIT)
    with served(address, welcome=replace(WELCOME, engine="successor")) as successor:
        await gateway.until_state("ready")
        assert gateway.of(Welcome)[-1].engine == "successor"
        assert gateway.socket.send(SUBMIT)
        await gateway.until(lambda: gateway.of(Tokens))
        assert successor.received == [SUBMIT]
    assert [state for state, _ in gateway.states] == ["ready", "lost", "ready"]


async def test_what_a_dead_engine_did_not_read_never_reaches_its_successor(
    address: str, make_gateway: MakeGateway
) -> None:
    engine = EngineSocket(address, WELCOME, WIRE)
    gateway = make_gateway()
    while gateway.socket.state != "ready":
        engine.receive(0.01)
        await asyncio.sleep(0.01)
    for stream in range(3000):
        gateway.socket.send(replace(SUBMIT, stream=stream))
    engine.close(goodbye=False)
    with served(address) as successor:
        await gateway.until(lambda: [state for state, _ in gateway.states] == ["ready", "lost", "ready"])
        gateway.socket.send(replace(SUBMIT, stream=9000))
        await gateway.until(lambda: gateway.of(Tokens))
        assert successor.received == [replace(SUBMIT, stream=9000)]


async def test_an_engine_that_falls_silent_is_lost(address: str, make_gateway: MakeGateway) -> None:
    """Connected, but without a heartbeat: hung. It is found again when it answers."""
    with raw_engine(address) as engine:
        gateway = make_gateway(wire=replace(WIRE, dead_after_s=0.3))
        await greet(engine)
        await gateway.until_state("ready")
        await gateway.until_state("lost")
        assert "no word from the engine for" in gateway.socket.reason
        await greet(engine)
        await gateway.until_state("ready")


async def test_the_gateway_pings(address: str, make_gateway: MakeGateway) -> None:
    with raw_engine(address) as engine:
        make_gateway()
        await greet(engine)
        pings = [await asyncio.to_thread(engine.hear) for _ in range(3)]
    times = [ping.sent_at for _, ping in pings if isinstance(ping, Ping)]
    assert len(times) == 3
    assert times == sorted(set(times))


async def test_goodbye_and_draining_are_states(address: str, make_gateway: MakeGateway) -> None:
    engine = Served(address)
    gateway = make_gateway()
    await gateway.until_state("ready")
    engine.load = replace(LOAD, state="draining")
    await gateway.until_state("draining")
    assert gateway.socket.send(Cancel(1))
    engine.stop(goodbye=True)
    await gateway.until_state("lost")
    assert gateway.socket.reason == "the engine said goodbye"


async def test_the_last_words_of_an_engine_are_heard(address: str, make_gateway: MakeGateway) -> None:
    """Frames that came just before the connection broke still count, even if the loop was busy meanwhile."""
    with raw_engine(address) as engine:
        gateway = make_gateway()
        peer = await greet(engine)
        await gateway.until_state("ready")
        engine.say(peer, *[replace(TOKENS, step=step) for step in range(200)])
    await gateway.until_state("lost")
    assert [tokens.step for tokens in gateway.of(Tokens)] == list(range(200))


@pytest.mark.parametrize(
    "frame",
    [*[frame for _, _, frame in corpus("to_gateway")][::9], encode(SUBMIT)],
    ids=lambda frame: frame[:6].hex() or "empty",
)
async def test_a_malformed_frame_ends_the_connection_and_a_new_one_is_made(
    address: str, make_gateway: MakeGateway, frame: bytes
) -> None:
    with raw_engine(address) as engine:
        gateway = make_gateway()
        peer = await greet(engine)
        await gateway.until_state("ready")
        engine.router.send_multipart([peer, frame])
        await gateway.until_state("lost")
        assert gateway.socket.reason.startswith("the engine sent a frame that is ")
        assert gateway.socket.refused_frames == 1
        await greet(engine)
        await gateway.until_state("ready")


async def test_a_message_of_several_parts_ends_the_connection(
    address: str, make_gateway: MakeGateway
) -> None:
    with raw_engine(address) as engine:
        gateway = make_gateway()
        peer = await greet(engine)
        await gateway.until_state("ready")
        engine.router.send_multipart([peer, encode(TOKENS), encode(TOKENS)])
        await gateway.until_state("lost")
        assert gateway.of(Tokens) == []


async def test_tokens_before_welcome_are_refused(address: str, make_gateway: MakeGateway) -> None:
    with raw_engine(address) as engine:
        gateway = make_gateway()
        peer, _ = await asyncio.to_thread(engine.hear)
        engine.say(peer, TOKENS, WELCOME)
        await gateway.until_state("lost")
        assert gateway.messages == []


async def test_a_full_queue_makes_send_false_and_blocks_nobody(
    address: str, make_gateway: MakeGateway
) -> None:
    """An engine that does not read: nothing is queued without bound, and `send` says so at once."""
    with raw_engine(address) as engine:
        gateway = make_gateway(wire=replace(WIRE, high_water_mark=10))
        await greet(engine)
        await gateway.until_state("ready")
        big = replace(SUBMIT, prompt=bytes(16_000))
        sent = 0
        while gateway.socket.send(big):
            sent += 1
            assert sent < 5000
        assert gateway.socket.state == "ready"
        while isinstance((await asyncio.to_thread(engine.hear))[1], Ping):
            pass
        async with asyncio.timeout(TIMEOUT_S):
            while not gateway.socket.send(Cancel(1)):
                await asyncio.to_thread(engine.hear)


async def test_a_message_that_the_engine_would_refuse_is_not_sent(
    address: str, make_gateway: MakeGateway
) -> None:
    """Else one person's request would cost the gateway its connection."""
    with served(address) as engine:
        gateway = make_gateway()
        await gateway.until_state("ready")
        with pytest.raises(MalformedFrame) as caught:
            gateway.socket.send(replace(SUBMIT, prompt=bytes(400_000)))
        assert caught.value.reason == "oversized"
        with pytest.raises(MalformedFrame) as caught:
            gateway.socket.send(replace(SUBMIT, request_id="x" * 300))
        assert caught.value.reason == "malformed"
        assert gateway.socket.send(SUBMIT)
        await gateway.until(lambda: gateway.of(Tokens))
        assert engine.received == [SUBMIT]


async def test_close_says_goodbye_and_calls_nobody(address: str, make_gateway: MakeGateway) -> None:
    with served(address) as engine:
        gateway = make_gateway()
        await gateway.until_state("ready")
        gateway.socket.close()
        gateway.socket.close()
        states = list(gateway.states)
        assert await asyncio.to_thread(engine.heard_something.wait, TIMEOUT_S)
        assert engine.received == [Goodbye()]
        assert gateway.states == states
        assert not gateway.socket.send(SUBMIT)


async def test_close_inside_a_callback(address: str, make_gateway: MakeGateway) -> None:
    with raw_engine(address) as engine:
        gateway = make_gateway()
        peer = await greet(engine)
        await gateway.until_state("ready")
        listen = gateway.socket._on_message

        def leave(message: ToGateway) -> None:
            gateway.socket.close()
            listen(message)

        gateway.socket._on_message = leave
        engine.say(peer, *[replace(TOKENS, step=step) for step in range(20)])
        await gateway.until(lambda: gateway.of(Tokens))
        while not isinstance((await asyncio.to_thread(engine.hear))[1], Goodbye):
            pass
    assert len(gateway.of(Tokens)) == 1


async def test_a_callback_that_raises_does_not_stop_the_reading(
    address: str, make_gateway: MakeGateway
) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    with raw_engine(address) as engine:
        gateway = make_gateway()
        peer = await greet(engine)
        await gateway.until_state("ready")
        listen = gateway.socket._on_message

        def stumble(message: ToGateway) -> None:
            listen(message)
            if isinstance(message, Rejected):
                raise ValueError(message.stream)

        gateway.socket._on_message = stumble
        engine.say(peer, *[Rejected(stream, "queue_full", "") for stream in range(5)], TOKENS)
        await gateway.until(lambda: gateway.of(Tokens))
    assert [message.stream for message in gateway.of(Rejected)] == list(range(5))
    assert len(complaints) == 5


async def test_several_sockets_share_a_context(tmp_path: Any) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    addresses = [f"ipc://{tmp_path}/{index}.sock" for index in range(3)]
    engines = [Served(address) for address in addresses]
    gateways = [Gateway(address, context=context) for address in addresses]
    for gateway in gateways:
        gateway.socket.start()
    for gateway in gateways:
        await gateway.until_state("ready")
    for gateway in gateways:
        gateway.socket.close()
    assert not context.closed
    context.term()
    for engine in engines:
        engine.stop()


def test_an_address_that_others_could_reach_needs_keys() -> None:
    with pytest.raises(ConfigError, match="open to others"):
        Gateway("tcp://10.0.0.1:5000")
