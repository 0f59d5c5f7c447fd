"""Many things that each wait equally long, on one timer of the event loop.

A stream costs a dictionary entry here where a timer of its own would be the dearest thing about it. Knows nobody;
streams, answers and connections wait here.
"""

import asyncio
from typing import Protocol


class Waiting(Protocol):
    """Something with a deadline."""

    def overdue(self) -> None:
        """Its time is over, and it waits no more; it may wait again. Must not raise."""


class Deadlines:
    """Who waits, in the order of their deadlines, which is the order in which they came.

    Args:
        after_s: how long each waits, seconds.
    """

    __slots__ = ("_due", "_timer", "after_s")

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s
        self._due: dict[Waiting, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, waiting: Waiting) -> None:
        """Begin to wait; whoever waits already keeps its deadline."""
        loop = asyncio.get_running_loop()
        due = self._due.setdefault(waiting, loop.time() + self.after_s)
        if self._timer is None:
            self._timer = loop.call_at(due, self._expire)

    def discard(self, waiting: Waiting) -> None:
        """Wait no more, if it does."""
        self._due.pop(waiting, None)

    def _expire(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        try:
            while self._due:
                waiting = next(iter(self._due))
                if self._due[waiting] > now:
                    break
                del self._due[waiting]
                waiting.overdue()
        finally:
            if self._due and self._timer is None:
                self._timer = loop.call_at(next(iter(self._due.values())), self._expire)
