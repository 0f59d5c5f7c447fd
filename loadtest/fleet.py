"""The processes of a gateway benchmark: one synthetic engine, and the front ends that share it, each on its core.

Starts them by module name and ends them; reads what they use from /proc. bench_gateway.py runs one fleet a bench.
"""

import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.config import Config, ConfigError, GatewayConfig, ModelConfig, SchedulerConfig, WireConfig
from headrace.loadtest.gateway_plan import AIOHTTP, FASTAPI, HEADRACE, Kind

START_S = 60.0
MODEL = "bench"
PEERS = {
    FASTAPI: "headrace.loadtest.peers.fastapi_server",
    AIOHTTP: "headrace.loadtest.peers.aiohttp_server",
}


class NotStarted(ConfigError):
    """A process of the benchmark did not come up; the message ends with what it said."""


@dataclass(frozen=True, slots=True)
class Cores:
    """Who runs where. A second worker has a spare core; where there is none it shares the first one's.

    Beside client and engine it would be slowed by them; on one core two workers do no more than one, but what a token
    costs them tells what they would do on two.
    """

    server: int
    client: int  # and the engine's
    spare: tuple[int, ...] = ()

    def of_worker(self, index: int) -> int:
        places = (self.server, *self.spare)
        return places[index] if index < len(places) else self.server


@dataclass(frozen=True, slots=True)
class Front:
    """A front end that serves."""

    kind: Kind
    port: int
    pids: tuple[int, ...]  # one of each worker

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True, slots=True)
class Fleet:
    """What runs."""

    engine_pid: int
    fronts: tuple[Front, ...]
    step_log: Path

    def steps(self) -> NDArray[np.float64]:
        """When the engine ended each of its steps so far, seconds of time.monotonic."""
        return np.fromfile(self.step_log, np.float64)


@contextmanager
def fleet(kinds: Sequence[Kind], step_ms: float, cores: Cores) -> Iterator[Fleet]:
    """An engine and the front ends named, ready; each stays on its core.

    Raises:
        NotStarted: one of them is not ready in time.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-bench-")))
        ports = [_free_port() for _ in kinds]
        config = Config(
            # A context that no stream of a benchmark reaches: the model itself is not run.
            model=ModelConfig(served_name=MODEL, max_model_len=1 << 20),
            scheduler=SchedulerConfig(
                max_num_seqs=1 << 14, max_num_batched_tokens=1 << 18, max_waiting=1 << 15
            ),
            # An engine that outruns a front end must not drop it: the peers have no way to start over.
            wire=WireConfig(run_dir=str(folder), high_water_mark=1 << 18),
            gateway=GatewayConfig(port=ports[0], max_streams=1 << 15),
        ).resolve()
        steps = folder / "steps"
        path = folder / "config.json"
        path.write_text(json.dumps(config.to_dict()))
        engine = ("--index", "0", "--step-ms", str(step_ms), "--step-log", str(steps))
        engine_pid = _spawn(stack, folder, cores.client, "headrace.loadtest.synthetic", path, *engine)
        started = []
        for kind, port in zip(kinds, ports, strict=True):
            if kind.name == HEADRACE:
                pids = _spawn_workers(stack, folder, config, kind, port, cores)
            else:
                pids = (_spawn(stack, folder, cores.server, PEERS[kind.name], path, "--port", str(port)),)
            started.append(Front(kind, port, pids))
        for front in started:
            _wait_ready(front, folder)
        yield Fleet(engine_pid, tuple(started), steps)


def _spawn_workers(
    stack: ExitStack, folder: Path, config: Config, kind: Kind, port: int, cores: Cores
) -> tuple[int, ...]:
    """The workers of our gateway, in a run directory of their own."""
    run_dir = folder / kind.label
    run_dir.mkdir()
    own = run_dir / "config.json"
    gateway = replace(config.gateway, port=port, workers=kind.workers)
    wire = replace(config.wire, run_dir=str(run_dir), engines=config.engine_addresses())
    own.write_text(json.dumps(replace(config, gateway=gateway, wire=wire).to_dict()))
    return tuple(
        _spawn(
            stack,
            run_dir,
            cores.of_worker(index),
            "headrace.gateway.worker",
            own,
            "--index",
            str(index),
        )
        for index in range(kind.workers)
    )


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and its threads so far."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def resident_bytes(pid: int) -> int:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _spawn(stack: ExitStack, folder: Path, core: int, module: str, config: Path, *arguments: str) -> int:
    log = stack.enter_context((folder / f"{module}.log").open("ab"))
    argv = [sys.executable, "-P", "-m", module, "--config", str(config), *arguments]
    process = subprocess.Popen(  # noqa: S603 - our own interpreter and modules
        argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log
    )
    stack.callback(_end, process)
    os.sched_setaffinity(process.pid, {core})
    return process.pid


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask twice, so that nothing is drained."""
    for _ in range(2):
        process.terminate()
        try:
            process.wait(1.0)
        except subprocess.TimeoutExpired:
            continue
        return
    process.kill()
    process.wait()


def _wait_ready(front: Front, folder: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        connection = http.client.HTTPConnection("127.0.0.1", front.port, timeout=5)
        try:
            connection.request("GET", "/ready")
            if connection.getresponse().status == 200:
                return
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        time.sleep(0.05)
    logs = "\n".join(path.read_text(errors="replace")[-500:] for path in sorted(folder.rglob("*.log")))
    raise NotStarted(f"{front.kind.label} is not ready after {START_S:g} s\n{logs}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
