"""What a service needs before its first child: port, run directory, environment, flags, and words for failures."""

import fcntl
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.config import Config, ConfigError, GatewayConfig
from headrace.environ import Environment, read_environment
from headrace.gateway.families import COUNTED, REPORTED
from headrace.gateway.flags import parse_size
from headrace.gateway.listen import reserve_port, worker_socket
from headrace.gateway.readiness import base_url, greeting
from headrace.gateway.rundir import MAX_SOCKET_PATH, read_config, run_directory, write_config


def headrace(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, run to its end."""
    command = [sys.executable, "-P", "-m", "headrace", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_port_in_use_is_refused_even_if_its_owner_shares_it() -> None:
    """SO_REUSEPORT would let two services of one user mix on a port."""
    with worker_socket("127.0.0.1", 0) as other:
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            reserve_port("127.0.0.1", port)


def test_a_reserved_port_is_kept_for_the_workers() -> None:
    with reserve_port("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        with worker_socket("127.0.0.1", port) as first, worker_socket("127.0.0.1", port) as second:
            first.listen()
            second.listen()
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))


def test_connections_reach_workers_not_the_reservation() -> None:
    with reserve_port("127.0.0.1", 0) as held:
        port = held.getsockname()[1]
        with worker_socket("127.0.0.1", port) as worker:
            worker.listen()
            for _ in range(16):
                with socket.create_connection(("127.0.0.1", port), timeout=5):
                    worker.setblocking(True)
                    worker.accept()[0].close()


def test_accepted_sockets_send_at_once_and_buffer_little() -> None:
    with worker_socket("127.0.0.1", 0) as worker:
        worker.listen()
        with socket.create_connection(worker.getsockname(), timeout=5):
            worker.setblocking(True)
            accepted, _ = worker.accept()
            with accepted:
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) <= 256 << 10


@pytest.mark.parametrize(
    ("host", "words"), [("no.such.host.invalid", "is not an address"), ("192.0.2.1", "cannot listen")]
)
def test_an_address_that_is_not_ours_is_named(host: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        reserve_port(host, 8000)


def test_a_fresh_run_directory_is_private_and_removed() -> None:
    with run_directory("") as path:
        assert path.stat().st_mode & 0o777 == 0o700
        assert len(str(path / "worker-255.http")) <= MAX_SOCKET_PATH
        target = write_config(path, Config(gateway=GatewayConfig(api_keys=("secret",))))
        assert target.stat().st_mode & 0o777 == 0o600
        assert read_config(target).gateway.api_keys == ("secret",)
        assert read_config(target).wire.run_dir == str(path)
    assert not path.exists()


def test_a_given_run_directory_stays_without_the_secrets(tmp_path: Path) -> None:
    (tmp_path / "worker-0.tally").write_text("of an earlier service")
    with run_directory(str(tmp_path)) as path:
        assert not (path / "worker-0.tally").exists()
        write_config(path, Config())
    assert tmp_path.exists()
    assert not (tmp_path / "config.json").exists()


def test_two_services_do_not_share_a_run_directory(tmp_path: Path) -> None:
    with (
        run_directory(str(tmp_path)),
        pytest.raises(ConfigError, match="in use by another"),
        run_directory(str(tmp_path)),
    ):
        pass


def stale_directory(folder: Path, age_s: float) -> Path:
    """What a supervisor leaves that was killed so long ago."""
    path = folder / f"headrace-{age_s:.0f}"
    path.mkdir(mode=0o700)
    write_config(path, Config(gateway=GatewayConfig(api_keys=("secret",))))
    for name in ("lock", "worker-0.http", "worker-0.tally", "engine-0.sock"):
        (path / name).touch()
    then = time.time() - age_s
    os.utime(path / "lock", (then, then))
    return path


def test_what_a_killed_supervisor_left_is_removed_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left, young, held, foreign = (stale_directory(tmp_path, age_s) for age_s in (3600, 1, 7200, 9000))
    (foreign / "notes.txt").touch()
    with (held / "lock").open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with run_directory("") as path:
            assert path.parent == tmp_path
            assert not left.exists()
            assert (young / "config.json").exists(), "it may be about to lock it"
            assert (held / "config.json").exists(), "its service runs"
            assert (foreign / "notes.txt").exists(), "not a service's file"
            assert not (foreign / "config.json").exists(), "the keys are gone all the same"


def test_a_given_run_directory_has_no_neighbours_removed(tmp_path: Path) -> None:
    left = stale_directory(tmp_path, 3600)
    with run_directory(str(tmp_path / "mine")):
        assert (left / "config.json").exists()


def test_a_run_directory_too_long_for_sockets_is_refused(tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="too long for unix sockets"),
        run_directory(str(tmp_path / ("x" * 120))),
    ):
        pass


def test_a_temporary_folder_too_long_for_sockets_is_avoided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    long = tmp_path / ("y" * 100)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with run_directory("") as path:
        assert path.parent == Path("/tmp")
    assert not list(long.iterdir())


def test_the_environment_is_read_once_into_a_record() -> None:
    variables = {"HEADRACE_API_KEYS": "a, b", "HEADRACE_URL": "http://x/", "HEADRACE_LOG_LEVEL": "DEBUG"}
    assert read_environment(variables) == Environment(api_keys=("a", "b"), url="http://x", log_level="debug")
    assert read_environment({}) == Environment()


@pytest.mark.parametrize(
    ("name", "value"),
    [("HEADRACE_API_KEYS", "a,,b"), ("HEADRACE_URL", "localhost"), ("HEADRACE_LOG_LEVEL", "loud")],
)
def test_a_bad_variable_is_named(name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=name):
        read_environment({name: value})


def test_every_variable_is_in_the_table_of_the_docs() -> None:
    root = Path(__file__).parents[2]
    source, page = (root / "src/headrace/environ.py").read_text(), (root / "docs/operations.md").read_text()
    names = set(re.findall(r'get\("(HEADRACE_\w+)"', source))
    assert len(names) >= 5
    assert not {name for name in names if f"`{name}`" not in page}


@pytest.mark.parametrize(
    ("text", "size"),
    [("512M", 512 << 20), ("8G", 8 << 30), ("1.5 GiB", 3 << 29), ("4096", 4096), ("2kB", 2048)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size("--kv-memory", text) == size


@pytest.mark.parametrize("text", ["", "G", "-1G", "1X", "1e9"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--kv-memory"):
        parse_size("--kv-memory", text)


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:80"), ("::", "http://[::1]:80"), ("10.0.0.7", "http://10.0.0.7:80")],
)
def test_the_url_works_on_this_machine(host: str, url: str) -> None:
    assert base_url(host, 80) == url


def test_the_greeting_has_a_command_to_paste_and_no_key() -> None:
    config = Config().resolve()
    config = replace(config, gateway=replace(config.gateway, api_keys=("hush",)))
    text = greeting(config, 8000, 1.0)
    assert text.startswith("ready: http://127.0.0.1:8000 (")
    assert "curl -N http://127.0.0.1:8000/v1/chat/completions" in text
    assert "hush" not in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("serve", "--model", "/no/such/folder"), "/no/such/folder has no config.json"),
        (("serve", "--port", "99999"), "99999 is outside 0..65535"),
        (("serve", "--kv-memory", "1G", "--kv-blocks", "5"), "give one"),
        (("serve", "--step-ms", "5"), "--engine synthetic"),
        (("serve", "--no-such-flag"), "No such option"),
        (("serve", "--dtype", "int3"), "int3"),
        (("engine", "--address", "tcp://0.0.0.0:5555", "--dtype", "int3"), "int3"),
        (("engine", "--address", "tcp://0.0.0.0:5555"), "open to others"),
        (("engine", "--address", "udp://0.0.0.0:5555"), "neither ipc://PATH nor tcp://"),
        (("serve", "--engine-address", "tcp://192.0.2.1:5555"), "open to others"),
        (("serve", "--engine-address", "tcp://192.0.2.1:5555", "--curve-dir", "/no/keys"), "cannot read"),
        (("models", "/no/such/folder"), "cannot read"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(arguments: tuple[str, ...], words: str) -> None:
    ended = headrace(*arguments)
    assert ended.returncode == 2
    assert words in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_server_that_is_not_there_is_one_sentence_and_exit_code_1() -> None:
    with reserve_port("127.0.0.1", 0) as held:
        url = f"http://127.0.0.1:{held.getsockname()[1]}"
        for command in ("models", "chat"):
            ended = headrace(command, "--url", url)
            assert ended.returncode == 1
            assert ended.stderr.startswith(f"headrace: no server at {url}")
            assert ended.stderr.count("\n") == 1


def test_help_lists_the_commands_that_exist() -> None:
    text = headrace("--help").stdout
    for command in ("serve", "engine", "chat", "models", "keys", "loadtest", "economics", "bench"):
        assert f" {command} " in text
    assert " replay " not in text


def test_models_describes_a_folder(embedded_path: Path) -> None:
    text = headrace("models", str(embedded_path)).stdout
    for words in ("DeepseekV3ForCausalLM", "F8_E4M3", "fp8, blocks of [128, 128]"):
        assert words in text


def test_keys_are_made_once(tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    assert headrace("keys", str(folder)).returncode == 0
    assert (folder / "engine.secret").stat().st_mode & 0o777 == 0o600
    again = headrace("keys", str(folder))
    assert again.returncode == 2
    assert "exists" in again.stderr


def test_every_flag_of_serve_is_in_the_table_of_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text()
    flags = set(re.findall(r"--[a-z][a-z-]+", headrace("serve", "--help").stdout)) - {"--help"}
    assert len(flags) > 25
    assert not {flag for flag in flags if f"`{flag}" not in page}


def test_every_metric_is_in_the_table_of_the_docs() -> None:
    page = (Path(__file__).parents[2] / "docs/operations.md").read_text()
    for family in (*COUNTED, *REPORTED):
        name = f"{family.name}_total" if family.kind == "counter" else family.name
        assert f"| `{name}` | {family.kind} |" in page
