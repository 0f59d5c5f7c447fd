"""Joins what a stream has to write within one turn of the event loop into one system call.

One engine step a turn means one write per stream and step, no later than before. A gateway that has fallen behind
reads several steps a turn, and then sends their tokens together: the busier, the cheaper. Knows no HTTP.
"""

import asyncio
from typing import Protocol


class Corked(Protocol):
    """Something with bytes to write."""

    def flush(self) -> None:
        """Write them; must not raise."""


class Cork:
    """Flushes everything that was added, once the callbacks that are running now have returned."""

    __slots__ = ("_waiting",)

    def __init__(self) -> None:
        self._waiting: list[Corked] = []

    def add(self, corked: Corked) -> None:
        """Flush `corked` soon; the caller adds it once only until then."""
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
        self._waiting.append(corked)

    def _flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        for corked in waiting:
            corked.flush()
