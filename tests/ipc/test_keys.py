"""Over tcp:// only gateways whose key the engine lists may connect, and only to the engine whose key they have."""

import asyncio
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.config import ConfigError, WireConfig
from headrace.ipc.endpoint import check_address
from headrace.ipc.engine_socket import EngineSocket
from headrace.ipc.gateway_socket import GatewaySocket
from headrace.ipc.keys import create_keys, load_engine_keys, load_gateway_keys
from tests.ipc.samples import WELCOME, WIRE

TIMEOUT_S = 10.0


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    create_keys(tmp_path / "keys")
    return tmp_path / "keys"


def test_secrets_are_private(keys: Path) -> None:
    assert keys.stat().st_mode & 0o777 == 0o700
    for role in ("engine", "gateway"):
        assert (keys / f"{role}.secret").stat().st_mode & 0o777 == 0o600


def test_the_pairs_belong_together(keys: Path) -> None:
    engine, gateway = load_engine_keys(keys), load_gateway_keys(keys)
    assert gateway.engine == (keys / "engine.public").read_bytes().strip()
    assert gateway.public == (keys / "gateway.public").read_bytes().strip()
    assert len(engine.allowed) == 1
    assert len({engine.secret, gateway.secret, gateway.public, gateway.engine}) == 4


def test_no_key_is_overwritten(keys: Path) -> None:
    before = (keys / "engine.secret").read_bytes()
    with pytest.raises(ConfigError, match="exists"):
        create_keys(keys)
    assert (keys / "engine.secret").read_bytes() == before


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_a_secret_that_others_can_read_is_refused(keys: Path, mode: int) -> None:
    (keys / "engine.secret").chmod(mode)
    (keys / "gateway.secret").chmod(mode)
    with pytest.raises(ConfigError, match=f"{mode:04o}"):
        load_engine_keys(keys)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_gateway_keys(keys)


@pytest.mark.parametrize("content", [b"", b"short", b"x" * 41, b"\xff" * 40, b" " * 40, b"~" * 40])
def test_a_file_without_a_key_is_refused(keys: Path, content: bytes) -> None:
    for name in ("engine.secret", "gateway.secret", "clients/gateway.public"):
        (keys / name).write_bytes(content)
    with pytest.raises(ConfigError, match="holds no key"):
        load_engine_keys(keys)
    with pytest.raises(ConfigError, match="holds no key"):
        load_gateway_keys(keys)


def test_missing_files_are_named(keys: Path) -> None:
    shutil.rmtree(keys / "clients")
    with pytest.raises(ConfigError, match="no gateway may connect"):
        load_engine_keys(keys)
    (keys / "gateway.secret").unlink()
    with pytest.raises(ConfigError, match=r"gateway\.secret: No such file"):
        load_gateway_keys(keys)


def test_loopback_needs_no_keys_and_other_addresses_do() -> None:
    for address in (
        "tcp://127.0.0.1:1",
        "tcp://127.8.8.8:1",
        "tcp://localhost:1",
        "tcp://[::1]:1",
        "ipc:///x",
    ):
        check_address(address, "")
    with pytest.raises(ConfigError, match="headrace keys"):
        check_address("tcp://192.168.1.5:1", "")
    check_address("tcp://192.168.1.5:1", "/keys")


class Guarded:
    """An engine at a tcp address, turned by a thread until it is told to end."""

    def __init__(self, wire: WireConfig) -> None:
        self.socket = EngineSocket("tcp://127.0.0.1:0", WELCOME, wire)
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while not self._end.is_set():
            self.socket.receive(0.01)

    def stop(self) -> None:
        self._end.set()
        self._thread.join()
        self.socket.close()


async def state_after(address: str, wire: WireConfig, until: Callable[[str, str], bool]) -> str:
    """Connect a gateway; its reason at the first state that satisfies the condition."""
    told: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_state(state: str, reason: str) -> None:
        if until(state, reason) and not told.done():
            told.set_result(reason)

    socket = GatewaySocket(address, "gateway-0", wire, lambda _: None, on_state)
    socket.start()
    try:
        return await asyncio.wait_for(told, TIMEOUT_S)
    finally:
        socket.close()


async def test_the_listed_key_connects_and_no_other(keys: Path, tmp_path: Path) -> None:
    """Own key; a stranger's; the right one, but for another engine; none at all."""
    create_keys(tmp_path / "other")
    stranger, misled = tmp_path / "stranger", tmp_path / "misled"
    shutil.copytree(tmp_path / "other", stranger)
    shutil.copy(keys / "engine.public", stranger)
    shutil.copytree(keys, misled)
    shutil.copy(tmp_path / "other" / "engine.public", misled)
    engine = Guarded(replace(WIRE, curve_dir=str(keys)))
    try:
        address = engine.socket.address

        def wire(directory: Path | None) -> WireConfig:
            return replace(WIRE, curve_dir=str(directory or ""))

        await state_after(address, wire(keys), lambda state, _: state == "ready")
        reason = await state_after(address, wire(stranger), lambda state, _: state == "refused")
        assert "does not let this gateway in" in reason
        reason = await state_after(address, wire(misled), lambda state, _: state == "refused")
        assert "hung up on in the handshake" in reason
        await state_after(address, wire(None), lambda state, _: state == "refused")
        assert engine.socket.refused_keys >= 1
        await state_after(address, wire(keys), lambda state, _: state == "ready")
    finally:
        engine.stop()


async def test_a_gateway_with_keys_does_not_talk_to_an_engine_without(keys: Path) -> None:
    engine = Guarded(WIRE)
    try:
        wire = replace(WIRE, curve_dir=str(keys))
        await state_after(engine.socket.address, wire, lambda state, _: state == "refused")
    finally:
        engine.stop()
