"""Counts refused frames, and logs each peer that sends them once.

Bounded on both sides: names are forgotten after MAX_NAMES newer ones, and lines are few per minute. The
engine's and the gateway's socket hold one each.
"""

import logging
from collections import OrderedDict

log = logging.getLogger(__name__)

MAX_NAMES = 1024
LINES_PER_MINUTE = 20


class Refusals:
    """What was refused so far. `total` and `by_reason` only grow."""

    def __init__(self) -> None:
        self.total = 0
        self.by_reason: dict[str, int] = {}
        self._names: OrderedDict[str, None] = OrderedDict()
        self._minute = 0
        self._lines = 0

    def count(self, reason: str) -> None:
        """One more refused frame."""
        self.total += 1
        self.by_reason[reason] = self.by_reason.get(reason, 0) + 1

    def report(self, name: str, reason: str, detail: str, now: float) -> None:
        """Log the peer `name`, unless it was logged before or too many others were."""
        if name in self._names:
            self._names.move_to_end(name)
            return
        self._names[name] = None
        if len(self._names) > MAX_NAMES:
            self._names.popitem(last=False)
        minute = int(now // 60)
        if minute != self._minute:
            self._minute, self._lines = minute, 0
        self._lines += 1
        if self._lines <= LINES_PER_MINUTE:
            log.warning("refused %s: %s: %s", name, reason, detail)
        elif self._lines == LINES_PER_MINUTE + 1:
            log.warning("more peers are refused; they are counted, not logged, for the rest of the minute")
