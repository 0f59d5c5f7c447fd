"""Finds gateway workers that hang: they run, but their event loop answers no more. The supervisor's guard.

A worker is asked over its own unix socket. Knows neither API nor engines: an engine's silence is noticed by the
workers. serve.py makes one.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

import aiohttp

from headrace.gateway.children import Child, Echo
from headrace.gateway.readiness import http_path


@dataclass(frozen=True, slots=True)
class Patience:
    """How often a worker is asked, and how long it may be silent. A loaded machine is slow, not hung."""

    every_s: float = 5.0
    silent_s: float = 30.0
    answer_s: float = 5.0  # that one answer may take


class Watchdog:
    """Asks the workers in turn; one that has answered before and is silent for too long is killed, to be started anew.

    Args:
        run_dir: with the workers' sockets.
        workers: in the order of their index.
        patience: before one is killed.
        echo: takes a line for the terminal.
    """

    def __init__(self, run_dir: Path, workers: Sequence[Child], patience: Patience, echo: Echo) -> None:
        self._run_dir = run_dir
        self._workers = workers
        self._patience = patience
        self._echo = echo

    async def run(self) -> None:
        """Watch until cancelled."""
        await asyncio.gather(*(self._watch(index, worker) for index, worker in enumerate(self._workers)))

    async def _watch(self, index: int, worker: Child) -> None:
        path = http_path(self._run_dir, index)
        heard: tuple[int | None, float] = (None, 0.0)  # the process, and when it last answered
        while True:
            pid = worker.pid
            if pid is not None and await self._answers(path) and pid == worker.pid:
                heard = (pid, monotonic())
            silent_s = monotonic() - heard[1]
            if pid is not None and heard[0] == pid == worker.pid and silent_s >= self._patience.silent_s:
                self._echo(f"{worker.spec.name} has not answered for {silent_s:.0f} s; killing it")
                worker.kill_process()
                heard = (None, 0.0)
            await asyncio.sleep(self._patience.every_s)

    async def _answers(self, path: Path) -> bool:
        """Whether anything comes back: a worker without engines says 503, but it lives."""
        timeout = aiohttp.ClientTimeout(total=self._patience.answer_s)
        connector = aiohttp.UnixConnector(str(path))
        try:
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.get("http://worker/health") as response,
            ):
                return response.status > 0
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False
