"""Keeps the processes of one service alive, and ends them in order: gateway workers first, then engines.

Knows nothing of HTTP or ZeroMQ; serve.py gives it the command lines. One per service, in its own process.
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from time import monotonic
from typing import Any

from headrace.gateway.children import Child, ChildSpec, Echo, RestartPolicy, Role

WORKER_GRACE_S = 5.0  # beyond the drain time, to flush the last answers
ENGINE_GRACE_S = 10.0
ECHO_S = (
    0.5  # a signal to a whole process group may arrive twice, from the sender and from a parent such as make
)


class Supervisor:
    """Runs until SIGTERM, SIGINT or SIGHUP (drain, then exit code 0) or until a role has no child left (exit code 1).

    Args:
        specs: the children; engines and workers are told apart by their role.
        policy: when a dead child is started again, and when it is given up.
        drain_s: seconds that running streams get to end after the first signal. A second signal kills.
        echo: takes each line for the terminal.
    """

    def __init__(
        self, specs: Sequence[ChildSpec], *, policy: RestartPolicy, drain_s: float, echo: Echo
    ) -> None:
        self._children = [Child(spec, policy, echo) for spec in specs]
        self._drain_s = drain_s
        self._echo = echo
        self._first_signal_at: float | None = None
        self._stop = asyncio.Event()

    @property
    def workers(self) -> list[Child]:
        """The gateway workers, in order."""
        return [child for child in self._children if child.spec.role == "worker"]

    async def run(self, *companions: Callable[[], Coroutine[Any, Any, None]]) -> int:
        """Start everything; returns the exit code.

        Args:
            companions: run beside the children, such as one that awaits readiness and says so; cancelled when the
                service ends.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup has SIGHUP ignored
                loop.add_signal_handler(number, self._on_signal, number)
        tasks = [asyncio.create_task(companion()) for companion in companions]
        runs = {asyncio.create_task(child.run()): child for child in self._children}
        try:
            failed = await self._watch(runs)
            await self._shut_down(in_order=not failed)
        finally:
            for task in tasks:
                task.cancel()
            for child in self._children:
                child.kill()
            await asyncio.wait(runs)
            for task in tasks:
                with suppress(asyncio.CancelledError):
                    await task
        return 1 if failed else 0

    async def _watch(self, runs: dict[asyncio.Task[str], Child]) -> bool:
        """Wait for a signal (False) or for a role to lose its last child (True)."""
        stopped = asyncio.create_task(self._stop.wait())
        running = dict(runs)
        try:
            while True:
                done, _ = await asyncio.wait({*running, stopped}, return_when=asyncio.FIRST_COMPLETED)
                if stopped in done:
                    return False
                for task in [task for task in running if task in done]:
                    child = running.pop(task)
                    left = sum(other.spec.role == child.spec.role for other in running.values())
                    self._echo(f"giving up: {task.result()}")
                    if not left:
                        self._echo(f"no {_PLURAL[child.spec.role]} left, stopping")
                        return True
                    self._echo(f"going on with {left} {_PLURAL[child.spec.role]}")
        finally:
            stopped.cancel()

    async def _shut_down(self, *, in_order: bool) -> None:
        """Workers end their streams while the engines still run; nothing to wait for when a role has failed."""
        grace = self._drain_s if in_order else 0.0
        for role, grace_s in (("worker", grace + WORKER_GRACE_S), ("engine", ENGINE_GRACE_S)):
            ending = [child for child in self._children if child.spec.role == role]
            await asyncio.gather(*(child.stop(grace_s) for child in ending))

    def _on_signal(self, number: signal.Signals) -> None:
        now = monotonic()
        if self._first_signal_at is None:
            self._first_signal_at = now
            self._echo(f"{number.name}: ending running streams, at most {self._drain_s:.0f} s; again to kill")
            self._stop.set()
            return
        if now - self._first_signal_at < ECHO_S:
            return
        self._echo(f"{number.name} again: killing")
        for child in self._children:
            child.kill()


_PLURAL: dict[Role, str] = {"worker": "gateway worker(s)", "engine": "engine(s)"}
