"""A gateway worker that hangs is killed and started again; one that is only slow to begin is left alone."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from headrace.gateway.children import Child, ChildSpec, RestartPolicy
from headrace.gateway.readiness import http_path
from headrace.gateway.watchdog import Patience, Watchdog
from tests.gateway.test_supervisor import SLEEP, Lines

POLICY = RestartPolicy(quick_s=0.0, first_delay_s=0.01)
EAGER = Patience(every_s=0.02, silent_s=0.3, answer_s=0.2)
ANSWERING = """
import os, socket, sys
if os.path.exists(sys.argv[1]):
    os.unlink(sys.argv[1])
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
listener.listen()
print("up", flush=True)
while True:
    connection, _ = listener.accept()
    if connection.recv(4096):
        connection.sendall(b"HTTP/1.1 503 No\\r\\nContent-Length: 0\\r\\nConnection: close\\r\\n\\r\\n")
        print("asked", flush=True)
    connection.close()
"""


@asynccontextmanager
async def watching(program: str, folder: Path) -> AsyncIterator[tuple[Child, Lines]]:
    """One worker under an eager watchdog."""
    lines = Lines()
    argv = (sys.executable, "-P", "-c", program, str(http_path(folder, 0)))
    child = Child(ChildSpec("worker 0", "worker", argv), POLICY, lines)
    run = asyncio.create_task(child.run())
    watch = asyncio.create_task(Watchdog(folder, [child], EAGER, lines).run())
    try:
        await asyncio.wait_for(lines.wait_for("up"), 20)
        yield child, lines
    finally:
        watch.cancel()
        child.kill()
        await run


async def test_a_worker_that_falls_silent_is_replaced(tmp_path: Path) -> None:
    """Any answer is a sign of life, also a 503."""
    async with watching(ANSWERING, tmp_path) as (child, lines):
        await asyncio.wait_for(lines.wait_for("asked", 3), 20)
        assert child.starts == 1
        assert child.pid is not None
        os.kill(child.pid, signal.SIGSTOP)
        await asyncio.wait_for(lines.wait_for("has not answered for"), 20)
        await asyncio.wait_for(lines.wait_for("up", 2), 20)
        assert any("worker 0 ended with SIGKILL" in line for line in lines.all)


async def test_a_worker_that_never_answered_is_still_starting(tmp_path: Path) -> None:
    async with watching(SLEEP, tmp_path) as (child, lines):
        await asyncio.sleep(3 * EAGER.silent_s)
        assert child.starts == 1
        assert not any("has not answered" in line for line in lines.all)
