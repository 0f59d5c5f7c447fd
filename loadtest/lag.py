"""The load generator's view of itself: how late its own event loop runs, how much of a core it takes.

Knows no request. driver.py keeps one for each run.
"""

import asyncio
from time import perf_counter, process_time

from headrace.loadtest.histogram import Histogram

PERIOD_S = 0.02


class LagMeter:
    """Sleeps again and again, and records by how much it overslept."""

    def __init__(self) -> None:
        self.lag = Histogram()
        self._task: asyncio.Task[None] | None = None
        self._began = perf_counter()
        self._cpu = process_time()

    def start(self) -> None:
        """Begin to measure."""
        self._began, self._cpu = perf_counter(), process_time()
        self._task = asyncio.get_running_loop().create_task(self._watch())

    async def stop(self) -> float:
        """End; returns the share of a core that the process took since `start`."""
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        return (process_time() - self._cpu) / max(perf_counter() - self._began, 1e-9)

    async def _watch(self) -> None:
        while True:
            due = perf_counter() + PERIOD_S
            await asyncio.sleep(PERIOD_S)
            self.lag.add(max(0.0, perf_counter() - due))
