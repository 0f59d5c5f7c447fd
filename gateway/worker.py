"""The process of one gateway worker: `python -P -m headrace.gateway.worker --config FILE --index I`.

Puts the parts together on a uvloop event loop: dispatcher, text, application, metrics, listening sockets. Drains on
SIGTERM. Started by the supervisor, which it does not outlive.
"""

import argparse
import asyncio
import gc
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import monotonic

import uvloop
import zmq
from aiohttp import web

from headrace.config import Config, ConfigError
from headrace.gateway.app import JOBS, KEYS, make_app
from headrace.gateway.chat_template import BadTemplate
from headrace.gateway.children import FATAL_EXIT
from headrace.gateway.connection import connections
from headrace.gateway.dispatcher import Dispatcher
from headrace.gateway.health import add_health
from headrace.gateway.http_counter import count_requests
from headrace.gateway.listen import BACKLOG, worker_socket
from headrace.gateway.metrics import Metrics
from headrace.gateway.peers import Peers, load_tally
from headrace.gateway.readiness import http_path
from headrace.gateway.rundir import read_config
from headrace.gateway.stats import WorkerStats
from headrace.gateway.text import Text, TextError
from headrace.gateway.websocket import add_websocket
from headrace.gateway.ws_session import SocketServices
from headrace.ipc.endpoint import Context
from headrace.ipc.messages import ToGateway
from headrace.ipc.sockets import GatewaySocket

log = logging.getLogger("headrace.gateway")

DRAIN_POLL_S = 0.05
# Ended answers leave no cycles (a test holds that), so the collector seldom has anything to find: a tenth less CPU for
# a short answer than with Python's own thresholds.
GC_THRESHOLDS = (20_000, 20, 100)
FLUSH_S = 2.0  # after the last stream ended, to write what is still buffered


class Worker:
    """One worker's parts, alive between `start` and `close`.

    Args:
        config: resolved, with `run_dir` and `port` filled in.
        index: of this worker.
        text: of the model served.
    """

    def __init__(self, config: Config, index: int, text: Text) -> None:
        self._config = config
        self._index = index
        self._context: Context = zmq.Context()
        connect = partial(_connect, config, f"{index}-{os.getpid()}", self._context)
        self.dispatcher = Dispatcher(config.engine_addresses(), connect, config.gateway.max_streams)
        self.stats = WorkerStats()
        run_dir = Path(config.wire.run_dir)
        metrics = Metrics(config.model.served_name, self.dispatcher, self.stats, load_tally(run_dir, index))
        self._peers = Peers(run_dir, index, config.gateway.workers, metrics.tally)
        app = make_app(config, self.dispatcher, text, self.stats)
        app.middlewares.insert(0, count_requests(self.stats))
        add_health(app, self.dispatcher, metrics, self._peers.ask)
        services = SocketServices(app[JOBS], app[KEYS], self.stats, config.gateway.header_timeout_s)
        add_websocket(
            app,
            services,
            origins=config.gateway.cors_origins,
            max_frame_bytes=config.gateway.max_body_bytes,
        )
        self._runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=FLUSH_S,
        )
        self._servers: list[asyncio.Server] = []

    async def start(self) -> None:
        """Connect to the engines and listen.

        Raises:
            ConfigError: the port or the keys cannot be used.
        """
        gateway = self._config.gateway
        self.dispatcher.start()
        await self._peers.start()
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        assert self._runner.server is not None
        make = connections(self._runner.server, gateway)
        path = http_path(Path(self._config.wire.run_dir), self._index)
        path.unlink(missing_ok=True)
        self._servers = [
            await loop.create_server(make, sock=worker_socket(gateway.host, gateway.port), backlog=BACKLOG),
            await loop.create_unix_server(make, str(path)),
        ]

    async def drain(self, cut: asyncio.Event) -> None:
        """Refuse new generations; return when the running ones ended, at the deadline, or when `cut` is set."""
        self.dispatcher.drain()
        deadline = monotonic() + self._config.gateway.drain_s
        while self.dispatcher.num_streams and monotonic() < deadline:
            with suppress(TimeoutError):
                await asyncio.wait_for(cut.wait(), DRAIN_POLL_S)
                return

    async def close(self) -> None:
        """Stop listening, let what is answered be written, leave the engines."""
        for server in self._servers:
            server.close()
        await self._runner.cleanup()
        self.dispatcher.close()
        await self._peers.close()
        self._context.term()


async def run(config: Config, index: int, text: Text) -> int:
    """Serve until SIGTERM or SIGINT; a second signal cuts the drain short. Returns the exit code."""
    loop = asyncio.get_running_loop()
    stop, cut = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (cut if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    worker = Worker(config, index, text)
    try:
        await worker.start()
        gc.freeze()  # what start-up made stays; the collector need not walk it again
        gc.set_threshold(*GC_THRESHOLDS)
        log.info("listening on %s:%d", config.gateway.host, config.gateway.port)
        await stop.wait()
        if worker.dispatcher.num_streams:
            log.info("draining %d streams", worker.dispatcher.num_streams)
        await worker.drain(cut)
    finally:
        await worker.close()
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="headrace gateway worker")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--index", type=int, required=True)
    arguments = parser.parse_args()
    config = read_config(arguments.config)
    logging.basicConfig(
        stream=sys.stderr,
        level=config.log_level.upper(),
        format=f"worker {arguments.index}: %(levelname)s %(message)s",
    )
    _raise_descriptor_limit()
    try:
        text = Text.load(Path(config.model.path))
        return uvloop.run(run(config, arguments.index, text))
    except (ConfigError, TextError, BadTemplate) as error:
        log.error("%s", error)
        return FATAL_EXIT


def _connect(
    config: Config,
    gateway: str,
    context: Context,
    address: str,
    on_message: Callable[[ToGateway], None],
    on_state: Callable[[str, str], None],
) -> GatewaySocket:
    return GatewaySocket(address, gateway, config.wire, on_message, on_state, context=context)


def _raise_descriptor_limit() -> None:
    """A stream is a descriptor; the usual soft limit of 1024 is for programs that use select()."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


if __name__ == "__main__":
    sys.exit(main())
