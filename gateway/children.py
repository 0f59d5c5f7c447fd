"""One child process after another under one name: started, echoed, restarted with back-off, given up.

Knows nothing of what the child does. The supervisor owns one Child per engine and per gateway worker.
"""

import asyncio
import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from time import monotonic
from typing import Literal

Echo = Callable[[str], None]
Role = Literal["engine", "worker"]

FATAL_EXIT = 2  # a child ends with it when starting it again cannot help, say a checkpoint that is broken
PR_SET_PDEATHSIG = 1
MAX_LINE_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run."""

    name: str  # for the log: "engine 0"
    role: Role
    argv: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a dead child is started again. A death is quick when it comes within `quick_s` of the start."""

    quick_s: float = 30.0
    max_quick: int = 5  # so many quick deaths in a row, and it is given up
    first_delay_s: float = 0.25  # doubles with each quick death
    max_delay_s: float = 10.0

    def delay_s(self, quick_deaths: int) -> float:
        """Seconds to wait after the n-th quick death in a row; 0 = it had lived long."""
        return min(self.max_delay_s, self.first_delay_s * 2.0 ** max(0, quick_deaths - 1))


class Child:
    """Keeps one process of `spec` alive until `stop`."""

    def __init__(self, spec: ChildSpec, policy: RestartPolicy, echo: Echo) -> None:
        self.spec = spec
        self.starts = 0
        self._policy = policy
        self._echo = echo
        self._process: asyncio.subprocess.Process | None = None
        self._last_lines: deque[str] = deque(maxlen=12)
        self._stopping = asyncio.Event()

    @property
    def pid(self) -> int | None:
        """Of the process that runs now."""
        return self._process.pid if self._process is not None else None

    async def run(self) -> str:
        """Start and restart; returns why it was given up, or "" after `stop`."""
        quick_deaths = 0
        while not self._stopping.is_set():
            started = monotonic()
            code = await self._run_once()
            if self._stopping.is_set():
                break
            lived = monotonic() - started
            quick_deaths = quick_deaths + 1 if lived < self._policy.quick_s else 0
            ended = f"{self.spec.name} ended with {describe_exit(code)} after {lived:.1f} s"
            if code == FATAL_EXIT:
                return self._reason(ended)
            if quick_deaths >= self._policy.max_quick:
                return self._reason(f"{ended}, quick death {quick_deaths} in a row")
            delay = self._policy.delay_s(quick_deaths)
            self._echo(f"{ended}; starting it again in {delay:.2g} s")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)
        return ""

    async def stop(self, grace_s: float) -> None:
        """Ask it to end, wait, and kill what is left of it after `grace_s`. `run` then returns."""
        self._stopping.set()
        process = self._process
        if process is None:
            return
        self._send(process, signal.SIGTERM)
        try:
            await asyncio.wait_for(process.wait(), grace_s)
        except TimeoutError:
            self._echo(f"{self.spec.name} did not end within {grace_s:.0f} s; killing it")
            self.kill()
            await process.wait()

    def kill(self) -> None:
        """End it and whatever it started, now."""
        self._stopping.set()
        if self._process is not None:
            self._send(self._process, signal.SIGKILL)

    def kill_process(self) -> None:
        """End the process that runs now; `run` starts the next, as after any death."""
        if self._process is not None:
            self._send(self._process, signal.SIGKILL)

    async def _run_once(self) -> int:
        self._last_lines.clear()
        self.starts += 1
        # A session of its own: Ctrl-C in a terminal reaches the supervisor alone, which then drains in order.
        process = await asyncio.create_subprocess_exec(
            *self.spec.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_die_with(os.getpid()),
            limit=MAX_LINE_BYTES,
        )
        self._process = process
        if self._stopping.is_set():
            self._send(process, signal.SIGTERM)
        assert process.stdout is not None
        echoing = asyncio.create_task(self._echo_lines(process.stdout))
        try:
            code = await process.wait()
            # A grandchild may hold the pipe open; what the child itself said has arrived by now.
            await asyncio.wait({echoing}, timeout=0.5)
        finally:
            echoing.cancel()
            self._process = None
            self._send(process, signal.SIGKILL)
        return code

    async def _echo_lines(self, pipe: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await pipe.readline()
            except ValueError:  # longer than MAX_LINE_BYTES; the reader has dropped it
                continue
            if not line:
                return
            text = line.decode(errors="replace").rstrip()
            if text:
                self._last_lines.append(text)
                self._echo(text if text.startswith(self.spec.name) else f"{self.spec.name}: {text}")

    def _reason(self, ended: str) -> str:
        lines = "".join(f"\n  | {line}" for line in self._last_lines)
        return f"{ended}" + (f"; its last lines:{lines}" if lines else "; it said nothing")

    def _send(self, process: asyncio.subprocess.Process, number: signal.Signals) -> None:
        """SIGTERM to the child, SIGKILL to its whole group: what it started goes with it."""
        with suppress(ProcessLookupError):
            if number == signal.SIGKILL:
                os.killpg(process.pid, number)
            else:
                process.send_signal(number)


def describe_exit(code: int) -> str:
    """ "exit code 3" or "SIGKILL"."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def module_argv(module: str, *args: str) -> tuple[str, ...]:
    """Run a module of ours. `-P`: the working directory must not shadow installed packages."""
    return (sys.executable, "-P", "-m", module, *args)


def _die_with(parent: int) -> Callable[[], None] | None:
    """Runs in the child before exec: the kernel kills it when the supervisor is gone, even by SIGKILL."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    number = signal.SIGKILL.value

    def tie() -> None:
        libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return tie
