"""The run directory of a service: sockets, the children's configuration, the workers' tallies.

Mode 0700, locked by its supervisor, short enough for unix sockets. Made and removed by serve.py.
"""

import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from headrace.config import Config, ConfigError

MAX_SOCKET_PATH = 107  # bytes; sockaddr_un on Linux has 108 with the final zero
LONGEST_NAME = "worker-255.http"
CONFIG_NAME = "config.json"
PREFIX = "headrace-"
LOCK_NAME = "lock"
YOUNG_S = 60.0  # a lock file so young may not be locked yet


@contextmanager
def run_directory(wanted: str) -> Iterator[Path]:
    """`wanted`, or a fresh one that is removed in the end.

    Raises:
        ConfigError: it cannot be used: too long a path, another's, or in use.
    """
    path = Path(wanted).absolute() if wanted else _fresh()
    if not wanted:
        _remove_stale(path.parent)
    try:
        _prepare(path)
        with _lock(path):
            _sweep(path)
            try:
                yield path
            finally:
                _sweep(path)
    finally:
        if not wanted:
            shutil.rmtree(path, ignore_errors=True)


def _sweep(path: Path) -> None:
    """Remove what a service leaves behind; the configuration holds its API keys."""
    for left in (path / CONFIG_NAME, *path.glob("worker-*"), *path.glob("engine-*.sock")):
        left.unlink(missing_ok=True)


def write_config(path: Path, config: Config) -> Path:
    """The configuration for the children, with `run_dir` filled in; it holds the API keys, so mode 0600."""
    config = replace(config, wire=replace(config.wire, run_dir=str(path)))
    target = path / CONFIG_NAME
    target.unlink(missing_ok=True)
    descriptor = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(config.to_dict(), file, indent=1)
    return target


def read_config(path: Path) -> Config:
    """What `write_config` wrote."""
    return Config.from_dict(json.loads(path.read_text()))


def _fresh() -> Path:
    """Below the system's temporary folder, or /tmp where that has too long a name."""
    path = Path(tempfile.mkdtemp(prefix=PREFIX))
    if _fits(path):
        return path
    path.rmdir()
    return Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp"))


def _remove_stale(folder: Path) -> None:
    """Remove run directories whose supervisor was killed before it could: they hold its API keys.

    Only what a service makes is removed, so a folder that merely has such a name loses nothing else.
    """
    for path in folder.glob(f"{PREFIX}*"):
        lock = path / LOCK_NAME
        try:
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                continue
            if time.time() - lock.stat().st_mtime < YOUNG_S:
                continue
            with lock.open("r+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _sweep(path)
                lock.unlink()
                path.rmdir()
        except OSError:  # in use, gone meanwhile, or with files in it that are not ours
            continue


def _prepare(path: Path) -> None:
    if not _fits(path):
        room = MAX_SOCKET_PATH - len(LONGEST_NAME) - 1
        raise ConfigError(f"run_dir: {path} is longer than {room} bytes, too long for unix sockets")
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = path.stat().st_uid
        if owner != os.getuid():
            raise ConfigError(f"run_dir: {path} belongs to user {owner}, not to {os.getuid()}")
        path.chmod(0o700)
    except OSError as error:
        raise ConfigError(f"run_dir: cannot use {path}: {error.strerror}") from error


def _fits(path: Path) -> bool:
    return len(os.fsencode(path / LONGEST_NAME)) <= MAX_SOCKET_PATH


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with (path / LOCK_NAME).open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise ConfigError(f"run_dir: {path} is in use by another service") from error
        yield
