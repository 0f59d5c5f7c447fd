"""The engine's message loop over a real socket, driven one turn at a time."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq

from headrace.config import WireConfig
from headrace.core.models.base import Model
from headrace.core.server import EngineServer
from headrace.ipc.codec import decode_to_gateway, encode
from headrace.ipc.engine_socket import EngineSocket
from headrace.ipc.messages import (
    PROTOCOL_VERSION,
    Cancel,
    Credit,
    Finished,
    Goodbye,
    Hello,
    Load,
    Rejected,
    Sampling,
    Submit,
    ToEngine,
    ToGateway,
    Tokens,
    Welcome,
)
from headrace.ipc.packed import pack_int32, rows
from tests.core.engines import load, make_engine

GREEDY = Sampling(max_tokens=6, temperature=0.0)


@pytest.fixture(scope="module")
def model(small_path: Path) -> Model:
    return load(small_path)


class Gateway:
    """A bare DEALER that has said Hello; `turn` runs the server until an expected message came."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], server: EngineServer, address: str) -> None:
        self._server = server
        self.heard: list[ToGateway] = []
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.connect(address)
        self.send(Hello(PROTOCOL_VERSION, "test", ""))
        self.until(lambda: any(isinstance(message, Welcome) for message in self.heard))

    def send(self, message: ToEngine) -> None:
        self.socket.send(encode(message))

    def submit(self, stream: int, prompt: list[int], sampling: Sampling = GREEDY, credit: int = 1000) -> None:
        self.send(Submit(stream, "same-id", "", "", 0, pack_int32(prompt), b"", sampling, credit))

    def turn(self) -> None:
        self._server.turn()
        while self.socket.poll(1):
            self.heard.append(decode_to_gateway(self.socket.recv()))

    def until(self, done: Callable[[], bool]) -> None:
        for _ in range(500):
            if done():
                return
            self.turn()
        raise AssertionError(f"500 turns brought only {self.heard}")

    def tokens(self, stream: int) -> list[int]:
        found: list[int] = []
        for message in self.heard:
            if isinstance(message, Tokens):
                for row_stream, start, ids in rows(message):
                    if row_stream == stream:
                        assert start == len(found), "rows come in order, without a gap"
                        found += ids
        return found

    def end(self, stream: int) -> Finished | None:
        ends = [
            ended
            for message in self.heard
            if isinstance(message, Tokens)
            for ended in message.finished
            if ended.stream == stream
        ]
        assert len(ends) <= 1, "a stream ends once"
        return ends[0] if ends else None

    def rejection(self, stream: int) -> Rejected | None:
        found = (m for m in self.heard if isinstance(m, Rejected) and m.stream == stream)
        return next(found, None)


@pytest.fixture
def server(model: Model, small_path: Path, tmp_path: Path) -> Iterator[EngineServer]:
    engine = make_engine(model, small_path)
    welcome = Welcome(PROTOCOL_VERSION, "0", "f" * 32, "small", model.spec.vocab_size, 256, 16, 200, 8)
    socket = EngineSocket(f"ipc://{tmp_path}/e.sock", welcome, WireConfig(heartbeat_s=0.05, dead_after_s=600))
    yield EngineServer(engine, socket, name="0", vocab_size=model.spec.vocab_size, beat_s=0.01)
    engine.scheduler.check_integrity()
    socket.close()


@pytest.fixture
def connect(server: EngineServer, tmp_path: Path) -> Iterator[Callable[[], Gateway]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made: list[Gateway] = []

    def connect() -> Gateway:
        made.append(Gateway(context, server, f"ipc://{tmp_path}/e.sock"))
        return made[-1]

    yield connect
    for gateway in made:
        gateway.socket.close()
    context.term()


def test_two_gateways_get_their_own_streams(connect: Callable[[], Gateway]) -> None:
    """Both call theirs stream 1 and use the same request id."""
    one, two = connect(), connect()
    one.submit(1, [5, 6, 7])
    two.submit(1, [9, 8])
    one.until(lambda: one.end(1) is not None)
    two.until(lambda: two.end(1) is not None)
    assert len(one.tokens(1)) == len(two.tokens(1)) == GREEDY.max_tokens
    end = one.end(1)
    assert end is not None
    assert (end.reason, end.usage.prompt_tokens, end.usage.output_tokens) == ("length", 3, 6)


def test_cancel_is_answered_with_an_end(connect: Callable[[], Gateway], server: EngineServer) -> None:
    gateway = connect()
    gateway.submit(1, [5, 6, 7], Sampling(max_tokens=200))
    gateway.until(lambda: len(gateway.tokens(1)) >= 3)
    gateway.send(Cancel(1))
    gateway.until(lambda: gateway.end(1) is not None)
    end = gateway.end(1)
    assert end is not None
    assert end.reason == "cancelled"
    assert server.load().blocks_used == 0


def test_credit_paces_a_stream(connect: Callable[[], Gateway], server: EngineServer) -> None:
    gateway = connect()
    gateway.submit(1, [5, 6, 7], credit=2)
    gateway.until(lambda: server.load().parked == 1)
    assert len(gateway.tokens(1)) == 2
    gateway.send(Credit(1, 100))
    gateway.until(lambda: gateway.end(1) is not None)
    assert len(gateway.tokens(1)) == 6


@pytest.mark.parametrize("leave", ["goodbye", "vanish"])
def test_a_gateway_that_leaves_takes_its_streams_along(
    connect: Callable[[], Gateway], server: EngineServer, leave: str
) -> None:
    stays, leaves = connect(), connect()
    leaves.submit(1, [5, 6, 7], Sampling(max_tokens=200))
    stays.submit(1, [1, 2], Sampling(max_tokens=100, temperature=0.0))
    leaves.until(lambda: len(leaves.tokens(1)) >= 2)
    if leave == "goodbye":
        leaves.send(Goodbye())
    else:
        leaves.socket.close()
    stays.until(lambda: stays.end(1) is not None)
    stays.until(lambda: server.load().running == 0)
    assert len(stays.tokens(1)) == 100
    assert server.load().blocks_used == 0


def test_what_cannot_be_served_is_rejected_with_value_and_limit(connect: Callable[[], Gateway]) -> None:
    gateway = connect()
    gateway.submit(1, [4000, 5000])
    gateway.submit(2, [1] * 256)
    gateway.until(lambda: gateway.rejection(1) is not None and gateway.rejection(2) is not None)
    first, second = gateway.rejection(1), gateway.rejection(2)
    assert first is not None
    assert second is not None
    assert (first.code, second.code) == ("bad_request", "too_long")
    assert "5000" in first.message
    assert "4096" in first.message
    assert "256" in second.message


def test_an_open_stream_number_is_not_taken_twice(connect: Callable[[], Gateway]) -> None:
    gateway = connect()
    gateway.submit(1, [5, 6], Sampling(max_tokens=50))
    gateway.submit(1, [5, 6])
    gateway.until(lambda: gateway.rejection(1) is not None)
    gateway.until(lambda: gateway.end(1) is not None)
    assert len(gateway.tokens(1)) == 50


def test_a_draining_engine_finishes_what_runs_and_takes_nothing_new(
    connect: Callable[[], Gateway], server: EngineServer
) -> None:
    gateway = connect()
    gateway.submit(1, [5, 6], Sampling(max_tokens=30, temperature=0.0))
    gateway.until(lambda: len(gateway.tokens(1)) >= 1)
    server.drain(60.0)
    gateway.submit(2, [5, 6])
    gateway.until(lambda: gateway.rejection(2) is not None)
    rejection = gateway.rejection(2)
    assert rejection is not None
    assert rejection.code == "draining"
    server.run()
    while gateway.socket.poll(100):
        gateway.heard.append(decode_to_gateway(gateway.socket.recv()))
    assert len(gateway.tokens(1)) == 30
    assert isinstance(gateway.heard[-1], Goodbye)


def test_load_reports_what_the_metrics_page_needs(connect: Callable[[], Gateway]) -> None:
    gateway = connect()
    for stream in (1, 2):
        gateway.submit(stream, list(range(10, 40)))
        gateway.until(lambda stream=stream: gateway.end(stream) is not None)  # type: ignore[misc]
    gateway.heard.clear()
    gateway.until(lambda: any(isinstance(message, Load) for message in gateway.heard))
    load = next(message for message in gateway.heard if isinstance(message, Load))
    assert load.output_tokens == 12
    assert load.prefix_hits >= 24
    assert load.prompt_tokens + load.cached_tokens == 60
    assert load.busy_s > 0
    assert load.state == "ready"
