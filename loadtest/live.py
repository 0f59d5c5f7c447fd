"""The terminal while a load test runs: one line of progress, a few lines of figures, four times a second.

Reads the driver; knows no transport. On a terminal that is none it prints a line a run.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from time import perf_counter

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from headrace.loadtest.driver import Driver
from headrace.loadtest.histogram import Histogram
from headrace.loadtest.show import seconds

PERIOD_S = 0.25


@asynccontextmanager
async def watching(driver: Driver, console: Console, title: str) -> AsyncIterator[None]:
    """Show the driver's run while the body lasts."""
    if not console.is_terminal:
        console.print(f"{title} ...")
        yield
        return
    view = _View(driver, title)
    with Live(view.draw(), console=console, auto_refresh=False, transient=True) as live:
        task = asyncio.get_running_loop().create_task(_refresh(view, live))
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait({task})


async def _refresh(view: "_View", live: Live) -> None:
    while True:
        await asyncio.sleep(PERIOD_S)
        live.update(view.draw(), refresh=True)


class _View:
    """What is drawn."""

    def __init__(self, driver: Driver, title: str) -> None:
        self._driver = driver
        self._title = title
        self._ended = 0
        self._events = 0
        self._at = perf_counter()

    def draw(self) -> Group:
        driver, now = self._driver, perf_counter()
        recorder, limits = driver.recorder, driver.limits
        recorder.fold()
        elapsed = now - driver.start
        events = recorder.num_events + sum(len(exchange.arrivals) for exchange in driver.client.exchanges)
        per_s = (events - self._events) / max(now - self._at, 1e-9)
        self._events, self._at = events, now
        done, total = (
            (elapsed, limits.duration_s) if limits.duration_s < inf else (recorder.requests, limits.requests)
        )
        head = Text.assemble((self._title, "bold"), f"  {elapsed:5.1f} s")
        if elapsed < limits.warmup_s:
            head.append("  warming up", "yellow")
        figures = Table.grid(padding=(0, 3))
        figures.add_row(
            f"{len(driver.client.exchanges)} open",
            f"{recorder.requests} done",
            Text(f"{recorder.failed} failed", "red" if recorder.failed else ""),
            f"{max(0.0, per_s):,.0f} events/s",
        )
        rows = Table.grid(padding=(0, 3))
        for name in ("ttft", "itl", "e2e"):
            rows.add_row(name.upper(), *_figures(recorder.latencies[name]))
        rows.add_row("client", *_figures(driver.lag.lag), "late")
        bar = Table.grid()
        bar.add_row(ProgressBar(total=total or None, completed=done, width=60))
        return Group(head, bar, figures, rows)


def _figures(histogram: Histogram) -> list[str]:
    return [f"{name} {seconds(histogram.quantile(q))}" for name, q in (("p50", 0.5), ("p99", 0.99))]
