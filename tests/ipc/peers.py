"""Raw ZeroMQ peers for the socket tests: they say whatever they are told to, at whichever end is not under test."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import zmq

from headrace.ipc.codec import decode_to_engine, decode_to_gateway, encode
from headrace.ipc.engine_socket import EngineSocket
from headrace.ipc.messages import ToEngine, ToGateway, Welcome
from tests.ipc.samples import HELLO

TIMEOUT_S = 10.0
Received = list[tuple[bytes, ToEngine]]


class Peer:
    """A DEALER at an engine's address, one thread with the engine."""

    def __init__(self, engine: EngineSocket, context: "zmq.Context[zmq.Socket[bytes]]") -> None:
        self.engine = engine
        self.dealer = context.socket(zmq.DEALER)
        self.dealer.linger = 0
        self.dealer.connect(engine.address)

    def send(self, *parts: bytes) -> None:
        """One message of these parts."""
        self.dealer.send_multipart(parts)

    def say(self, *messages: ToEngine) -> None:
        for message in messages:
            self.dealer.send(encode(message))

    def hear(self) -> ToGateway:
        """The next message, while the engine turns its socket."""
        turn(self.engine, lambda: self.dealer.poll(0) > 0)
        return decode_to_gateway(self.dealer.recv(zmq.NOBLOCK))

    def join(self) -> bytes:
        """Say Hello; our routing id."""
        before = set(self.engine.gateways)
        self.say(HELLO)
        assert isinstance(self.hear(), Welcome)
        (own,) = set(self.engine.gateways) - before
        return own

    def vanish(self) -> None:
        self.dealer.close(0)


def turn(engine: EngineSocket, until: Callable[[], object]) -> Received:
    """Receive again and again until the condition holds; all that came."""
    received: Received = []
    deadline = time.monotonic() + TIMEOUT_S
    while not until():
        assert time.monotonic() < deadline, "the condition never held"
        received += engine.receive(0.01)
    return received


def receive_some(engine: EngineSocket, count: int = 1) -> Received:
    """The next messages, `count` at least."""
    received: Received = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(received) < count:
        assert time.monotonic() < deadline, f"{len(received)} of {count} messages came"
        received += engine.receive(0.01)
    return received


class RawEngine:
    """A ROUTER where an engine should be."""

    def __init__(self, address: str) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.router = self._context.socket(zmq.ROUTER)
        self.router.linger = 0
        self.router.sndhwm = 0  # a test says all that it means to say
        self.router.bind(address)

    def hear(self) -> tuple[bytes, ToEngine]:
        """The next message, blocking: to be called in a thread of its own."""
        assert self.router.poll(int(TIMEOUT_S * 1000)), "nothing came"
        peer, frame = self.router.recv_multipart()
        return peer, decode_to_engine(frame)

    def say(self, peer: bytes, *messages: ToGateway) -> None:
        for message in messages:
            self.router.send_multipart([peer, encode(message)])

    def close(self) -> None:
        self._context.destroy(linger=500)


@contextmanager
def raw_engine(address: str) -> Iterator[RawEngine]:
    engine = RawEngine(address)
    try:
        yield engine
    finally:
        engine.close()
