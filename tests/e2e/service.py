"""A whole service as a user starts it: `headrace serve` in a process of its own, with synthetic engines."""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil

READY = re.compile(r"^ready: (http://\S+)")
MODEL = "tiny"


@dataclass
class RunningService:
    """The supervisor's process, what it said, and where it serves."""

    process: asyncio.subprocess.Process
    url: str
    run_dir: Path
    _log: asyncio.StreamReader
    _transport: asyncio.ReadTransport
    lines: list[str] = field(default_factory=list)
    _said: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def says(self, pattern: str) -> re.Match[str]:
        """Wait for a line of the supervisor or its children."""
        seen = 0
        async with self._said:
            while True:
                for line in self.lines[seen:]:
                    match = re.search(pattern, line)
                    if match:
                        return match
                seen = len(self.lines)
                await self._said.wait()

    async def listen(self) -> None:
        """Collect lines until the supervisor has ended."""
        while line := await self._log.readline():
            async with self._said:
                self.lines.append(line.decode().rstrip())
                self._said.notify_all()
        async with self._said:
            self.lines.append("<the supervisor has ended>")
            self._said.notify_all()

    def stop_listening(self) -> None:
        """Close our end of the pipe: the supervisor's next line finds no reader."""
        self._transport.close()

    def children(self, module: str = "") -> list[psutil.Process]:
        """The child processes; with `module`, only those that run it."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in found if module in " ".join(child.cmdline())]

    def child(self, module: str, index: int) -> psutil.Process:
        return next(c for c in self.children(module) if f"--index {index}" in " ".join(c.cmdline()))

    def worker_connector(self, index: int) -> aiohttp.UnixConnector:
        """To one worker, past the shared port."""
        return aiohttp.UnixConnector(str(self.run_dir / f"worker-{index}.http"))

    async def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return await self.process.wait()


async def start(run_dir: Path, *flags: str) -> RunningService:
    """Start a service on a free port; returns before it is ready."""
    ours, theirs = os.pipe()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-P", "-m", "headrace", "serve", "--port", "0", "--served-name", MODEL),
        *("--run-dir", str(run_dir), "--engine", "synthetic", *flags),
        stderr=theirs,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    os.close(theirs)
    log = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(log), os.fdopen(ours, "rb")
    )
    return RunningService(process, "", run_dir, log, transport)


@asynccontextmanager
async def running(run_dir: Path, *flags: str, greeted: bool = True) -> AsyncIterator[RunningService]:
    """A service that is ready, unless not to be `greeted`; afterwards nothing of it is left."""
    service = await start(run_dir, *flags)
    listening = asyncio.create_task(service.listen())
    children: list[psutil.Process] = []
    try:
        if greeted:
            service.url = (await service.says(f"{READY.pattern}|<the supervisor has ended>"))[1] or ""
            assert service.url, "\n".join(service.lines)
        children = service.children()
        yield service
    finally:
        with suppress(psutil.NoSuchProcess, ProcessLookupError):
            children = service.children() or children
            service.process.send_signal(signal.SIGTERM)
        await service.process.wait()
        await listening
        service.stop_listening()
        assert not [child for child in children if alive(child)], "\n".join(service.lines)


def alive(process: psutil.Process) -> bool:
    return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)


async def gone(processes: list[psutil.Process]) -> None:
    """Wait until none is left; pytest's timeout is the limit."""
    while any(alive(process) for process in processes):  # noqa: ASYNC110 - orphans have no parent to wait for them
        await asyncio.sleep(0.02)


async def stream_tokens(
    session: aiohttp.ClientSession, url: str, seed: int, max_tokens: int, prompt: str = "Once"
) -> AsyncIterator[tuple[str, str, str]]:
    """(id line, text, finish_reason) of each event of one completion, over SSE, up to [DONE]."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
    }
    async with session.post(f"{url}/v1/completions", json=body) as response:
        assert response.status == 200, await response.text()
        number = ""
        async for raw in response.content:
            line = raw.decode().rstrip("\n")
            if line.startswith("id: "):
                number = line[4:]
            elif line == "data: [DONE]":
                return
            elif line.startswith("data: "):
                event = json.loads(line[6:])
                assert "error" not in event, event
                choice = event["choices"][0]
                yield number, choice["text"], choice["finish_reason"] or ""
    raise AssertionError("the stream ended without [DONE]")
