"""Sockets for the tests of the wire; everything opened is closed, and contexts end."""

from asyncio import AbstractEventLoop, new_event_loop
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq

from headrace.ipc.engine_socket import EngineSocket
from tests.ipc.peers import Peer
from tests.ipc.samples import WELCOME, WIRE


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], AbstractEventLoop]]:
    """Both loops: they watch descriptors differently, and ZeroMQ's is edge-triggered."""
    return {"asyncio": new_event_loop, "uvloop": uvloop.new_event_loop}


@pytest.fixture
def address(tmp_path: Path) -> str:
    """An ipc:// address that nobody uses."""
    return f"ipc://{tmp_path}/engine.sock"


@pytest.fixture
def make_engine(address: str) -> Iterator[Callable[..., EngineSocket]]:
    """EngineSocket with some of its arguments changed; closed at the end."""
    made: list[EngineSocket] = []

    def make(at: str = address, **changes: Any) -> EngineSocket:
        engine = EngineSocket(at, changes.pop("welcome", WELCOME), changes.pop("wire", WIRE), **changes)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        if not engine.closed:
            engine.close(goodbye=False)


@pytest.fixture
def engine(make_engine: Callable[..., EngineSocket]) -> EngineSocket:
    return make_engine()


@pytest.fixture
def make_peer() -> Iterator[Callable[..., Peer]]:
    """Raw gateways."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    made: list[Peer] = []

    def make(engine: EngineSocket) -> Peer:
        made.append(Peer(engine, context))
        return made[-1]

    yield make
    for peer in made:
        peer.vanish()
    context.term()
