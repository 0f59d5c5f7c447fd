"""`headrace serve` and `headrace engine` below their flags: run directory, port, command lines, supervisor.

Knows modules by name only: no engine is imported here. cli.py calls.
"""

import asyncio
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic

from headrace.config import Config
from headrace.gateway.children import ChildSpec, RestartPolicy, module_argv
from headrace.gateway.listen import reserve_port
from headrace.gateway.readiness import greeting, wait_ready
from headrace.gateway.rundir import run_directory, write_config
from headrace.gateway.supervisor import Supervisor
from headrace.gateway.watchdog import Patience, Watchdog
from headrace.ipc.endpoint import check_address
from headrace.ipc.keys import load_engine_keys, load_gateway_keys

ENGINE = "headrace.core.main"
SYNTHETIC = "headrace.loadtest.synthetic"
WORKER = "headrace.gateway.worker"


def serve(config: Config, *, engine_module: str, engine_args: Sequence[str], policy: RestartPolicy) -> int:
    """Run a whole service until it is told to stop; returns the exit code.

    Args:
        config: resolved; `wire.engines` given = the engines run elsewhere and only workers are started.
        engine_module: ENGINE or SYNTHETIC.
        engine_args: command-line arguments for that module, after --config and --index.

    Raises:
        ConfigError: the port, the run directory, an engine's address or the keys cannot be used.
    """
    started = monotonic()
    for address in config.wire.engines:
        check_address(address, config.wire.curve_dir)
    if config.wire.engines and config.wire.curve_dir:
        load_gateway_keys(Path(config.wire.curve_dir))
    with ExitStack() as stack:
        held = stack.enter_context(reserve_port(config.gateway.host, config.gateway.port))
        run_dir = stack.enter_context(run_directory(config.wire.run_dir))
        port = _port(held)
        config = replace(
            config,
            gateway=replace(config.gateway, port=port),
            wire=replace(config.wire, run_dir=str(run_dir)),
        )
        path = write_config(run_dir, config)
        engines = 0 if config.wire.engines else config.engine.count
        specs = [_engine(engine_module, path, index, engine_args) for index in range(engines)]
        specs += [_worker(path, index) for index in range(config.gateway.workers)]
        echo(f"starting {engines} engine(s) and {config.gateway.workers} gateway worker(s)")

        async def greet() -> None:
            await wait_ready(run_dir, config.gateway.workers)
            echo(greeting(config, port, monotonic() - started))

        supervisor = Supervisor(specs, policy=policy, drain_s=config.gateway.drain_s, echo=echo)
        watchdog = Watchdog(run_dir, supervisor.workers, Patience(), echo)
        return asyncio.run(supervisor.run(greet, watchdog.run))


def serve_engine(config: Config, *, policy: RestartPolicy) -> int:
    """Run one engine alone, for gateways elsewhere, at `config.wire.engines[0]`; returns the exit code.

    Raises:
        ConfigError: the address, the keys or the run directory cannot be used.
    """
    check_address(config.wire.engines[0], config.wire.curve_dir)
    if config.wire.curve_dir:
        load_engine_keys(Path(config.wire.curve_dir))
    with run_directory(config.wire.run_dir) as run_dir:
        path = write_config(run_dir, config)
        echo(f"starting an engine at {config.wire.engines[0]}")
        supervisor = Supervisor([_engine(ENGINE, path, 0, ())], policy=policy, drain_s=0.0, echo=echo)
        return asyncio.run(supervisor.run())


def echo(line: str) -> None:
    """Everything for the operator goes to stderr, whole lines only; a service outlives the reader of its log."""
    with suppress(OSError, ValueError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


def _engine(module: str, config: Path, index: int, args: Sequence[str]) -> ChildSpec:
    argv = module_argv(module, "--config", str(config), "--index", str(index), *args)
    return ChildSpec(f"engine {index}", "engine", argv)


def _worker(config: Path, index: int) -> ChildSpec:
    argv = module_argv(WORKER, "--config", str(config), "--index", str(index))
    return ChildSpec(f"worker {index}", "worker", argv)


def _port(held: socket.socket) -> int:
    port: int = held.getsockname()[1]
    return port
