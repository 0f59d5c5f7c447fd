"""CurveZMQ keys: who may connect over tcp://, as files of one Z85 line each.

A folder made by `create_keys` serves one installation: engines hold `engine.secret`, gateways
`gateway.secret`, and `clients/*.public` lists the gateways that engines let in. CLI and ipc/endpoint.py call.
"""

import os
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.utils import z85

from headrace.config import ConfigError

KEY_CHARS = 40  # 32 bytes in Z85


@dataclass(frozen=True, slots=True)
class EngineKeys:
    """What an engine needs: its own secret, and the raw public keys of the gateways it lets in."""

    secret: bytes
    allowed: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class GatewayKeys:
    """What a gateway needs: its own pair, and the public key by which it knows the engine."""

    secret: bytes
    public: bytes
    engine: bytes


def create_keys(directory: Path) -> None:
    """Make the pairs of an engine and a gateway in `directory`, and let that gateway in.

    Raises:
        ConfigError: a key is there already; nothing is overwritten.
    """
    clients = directory / "clients"
    clients.mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.chmod(0o700)
    names = [directory / f"{role}.{half}" for role in ("engine", "gateway") for half in ("secret", "public")]
    for path in (*names, clients / "gateway.public"):
        if path.exists():
            raise ConfigError(f"wire.curve_dir: {path} exists; remove it to make new keys")
    for role in ("engine", "gateway"):
        public, secret = zmq.curve_keypair()
        _write(directory / f"{role}.secret", secret, 0o600)
        _write(directory / f"{role}.public", public, 0o644)
        if role == "gateway":
            _write(clients / "gateway.public", public, 0o644)


def load_engine_keys(directory: Path) -> EngineKeys:
    """Read what an engine needs.

    Raises:
        ConfigError: a file is missing or holds no key, others can read a secret, or no gateway is let in.
    """
    allowed = frozenset(z85.decode(_read(path)) for path in sorted((directory / "clients").glob("*.public")))
    if not allowed:
        raise ConfigError(
            f"wire.curve_dir: {directory / 'clients'} has no *.public file, so no gateway may connect"
        )
    return EngineKeys(_read_secret(directory / "engine.secret"), allowed)


def load_gateway_keys(directory: Path) -> GatewayKeys:
    """Read what a gateway needs.

    Raises:
        ConfigError: a file is missing, holds no key, or a secret is readable by others.
    """
    secret = _read_secret(directory / "gateway.secret")
    return GatewayKeys(secret, zmq.curve_public(secret), _read(directory / "engine.public"))


def _write(path: Path, key: bytes, mode: int) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(key + b"\n")


def _read_secret(path: Path) -> bytes:
    try:
        status = path.stat()
    except OSError as error:
        raise ConfigError(f"wire.curve_dir: cannot read {path}: {error.strerror}") from None
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise ConfigError(f"wire.curve_dir: {path} has mode {mode:04o}, others could read it; chmod 600 it")
    return _read(path)


def _read(path: Path) -> bytes:
    try:
        key = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"wire.curve_dir: cannot read {path}: {error.strerror}") from None
    try:
        if len(key) != KEY_CHARS:
            raise ValueError(len(key))
        z85.decode(key)
    except (ValueError, KeyError, IndexError, OverflowError):
        raise ConfigError(f"wire.curve_dir: {path} holds no key ({KEY_CHARS} characters of Z85)") from None
    return key
