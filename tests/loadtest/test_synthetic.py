"""The synthetic engine over the real wire: on a thread for tests, and as the process that stands in for an engine."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from headrace.config import CacheConfig, Config, GatewayConfig, ModelConfig, SchedulerConfig, WireConfig
from headrace.ipc.gateway_socket import GatewaySocket
from headrace.ipc.messages import (
    Cancel,
    Credit,
    Finished,
    Load,
    Rejected,
    Sampling,
    Submit,
    ToGateway,
    Tokens,
)
from headrace.ipc.packed import pack_int32, rows
from headrace.loadtest.synthetic import SyntheticEngine, options_from, parse_arguments
from headrace.loadtest.synthetic_options import SyntheticOptions
from headrace.loadtest.synthetic_tokens import TokenSource

TIMEOUT_S = 20.0
WIRE = WireConfig(heartbeat_s=0.05, dead_after_s=30.0)
OPTIONS = SyntheticOptions(token_ids=tuple(range(50, 90)), step_ms=1.0, vocab_size=1000)
SOURCE = TokenSource(OPTIONS.token_ids)


class Client:
    """A gateway of one engine that keeps what it gets."""

    def __init__(self, address: str, wire: WireConfig = WIRE) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.rejected: list[Rejected] = []
        self.load: Load | None = None
        self._news = asyncio.Event()
        self.socket = GatewaySocket(address, "client", wire, self._on_message, lambda *_: self._news.set())
        self.socket.start()

    def _on_message(self, message: ToGateway) -> None:
        self._news.set()
        match message:
            case Tokens():
                for stream, start, ids in rows(message):
                    assert start == len(self.tokens.setdefault(stream, []))
                    self.tokens[stream] += ids
                self.finished |= {ended.stream: ended for ended in message.finished}
            case Rejected():
                self.rejected.append(message)
            case Load():
                self.load = message
            case _:
                pass

    async def until(self, condition: Any) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not condition():
                self._news.clear()
                await self._news.wait()

    async def ready(self) -> None:
        await self.until(lambda: self.socket.state == "ready")

    def submit(self, stream: int, max_tokens: int, credit: int = 1 << 40) -> None:
        sampling = Sampling(max_tokens, seed=stream)
        assert self.socket.send(Submit(stream, "", "", "", 0, pack_int32([1, 2]), b"", sampling, credit))


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/engine.sock"


@pytest.fixture
async def client(address: str) -> AsyncIterator[Client]:
    client = Client(address)
    yield client
    client.socket.close()


async def test_streams_come_whole(address: str, client: Client) -> None:
    with SyntheticEngine(address, replace(OPTIONS, step_ms=0.0), WIRE):
        await client.ready()
        for stream in range(200):
            client.submit(stream, 50)
        await client.until(lambda: len(client.finished) == 200)
    assert client.tokens == {stream: SOURCE.sequence(stream, 0, 50) for stream in range(200)}


async def test_credit_and_cancel_work_over_the_wire(address: str, client: Client) -> None:
    with SyntheticEngine(address, OPTIONS, WIRE):
        await client.ready()
        client.submit(0, 10, credit=4)
        client.submit(1, 100_000)
        await client.until(lambda: client.load is not None and client.load.parked == 1)
        assert client.tokens[0] == SOURCE.sequence(0, 0, 4)
        client.socket.send(Credit(0, 10))
        client.socket.send(Cancel(1))
        await client.until(lambda: len(client.finished) == 2)
        assert client.tokens[0] == SOURCE.sequence(0, 0, 10)
        assert client.finished[1].reason == "cancelled"


async def test_kill_and_a_successor(address: str, client: Client) -> None:
    engine = SyntheticEngine(address, OPTIONS, WIRE)
    engine.start()
    await client.ready()
    client.submit(0, 100_000)
    await client.until(lambda: client.tokens)
    engine.kill()
    await client.until(lambda: client.socket.state == "lost")
    with SyntheticEngine(address, OPTIONS, WIRE):
        await client.ready()
        client.submit(1, 3)
        await client.until(lambda: 1 in client.finished)


async def test_a_frozen_engine_is_lost_and_found(address: str) -> None:
    wire = replace(WIRE, dead_after_s=0.4)
    client = Client(address, wire)
    with SyntheticEngine(address, OPTIONS, wire) as engine:
        await client.ready()
        engine.freeze()
        await client.until(lambda: client.socket.state == "lost")
        engine.thaw()
        await client.ready()
    client.socket.close()


async def test_a_drain_takes_nothing_new_and_ends_with_what_was_open(address: str, client: Client) -> None:
    engine = SyntheticEngine(address, OPTIONS, WIRE)
    engine.start()
    await client.ready()
    client.submit(0, 300)
    await client.until(lambda: client.tokens)
    engine.drain(60.0)
    await client.until(lambda: client.socket.state == "draining")
    client.submit(1, 3)
    await client.until(lambda: client.rejected)
    assert client.rejected[0].code == "draining"
    await client.until(lambda: client.socket.state == "lost")
    assert client.tokens[0] == SOURCE.sequence(0, 0, 300)
    engine.join()


@pytest.fixture
def config(tmp_path: Path, small_path: Path) -> Config:
    return Config(
        model=ModelConfig(path=str(small_path), served_name="small"),
        wire=replace(WIRE, run_dir=str(tmp_path)),
        gateway=GatewayConfig(drain_s=15.0),
    )


def test_the_command_line_takes_its_limits_from_the_configuration(config: Config) -> None:
    config = replace(
        config,
        model=replace(config.model, max_model_len=256),
        scheduler=SchedulerConfig(max_num_seqs=3, max_waiting=5, max_num_batched_tokens=64),
        cache=CacheConfig(block_size=32, num_blocks=77),
    )
    arguments = parse_arguments(["--config", "x", "--index", "2", "--step-ms", "20", "--token-ids", "5,6"])
    options = options_from(config, arguments)
    assert options == SyntheticOptions(
        token_ids=(5, 6),
        step_ms=20.0,
        engine="engine-2",
        model="small",
        vocab_size=options.vocab_size,
        max_model_len=256,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        max_waiting=5,
        num_blocks=77,
        block_size=32,
    )


async def test_the_process_serves_and_drains_on_sigterm(config: Config, tmp_path: Path) -> None:
    """SIGTERM lets the open stream end, then the process leaves with status 0."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config.to_dict()))
    command = [
        sys.executable,
        "-P",
        "-m",
        "headrace.loadtest.synthetic",
        "--config",
        str(path),
        "--index",
        "0",
    ]
    with subprocess.Popen([*command, "--step-ms", "2"], stderr=subprocess.PIPE) as process:  # noqa: ASYNC220
        try:
            client = Client(config.engine_addresses()[0])
            await client.ready()
            assert client.socket.welcome is not None
            assert client.socket.welcome.model == "small"
            client.submit(0, 200)
            await client.until(lambda: client.tokens)
            os.kill(process.pid, signal.SIGTERM)
            await client.until(lambda: client.socket.state == "lost")
            assert client.socket.reason == "the engine said goodbye"
            assert client.finished[0].reason == "length"
            assert len(client.tokens[0]) == 200
            client.socket.close()
            _, stderr = await asyncio.to_thread(process.communicate, timeout=TIMEOUT_S)
            assert process.returncode == 0
            assert b"engine 0 ready" in stderr
        finally:
            process.kill()
