"""A histogram as plain numbers: cheap to fill once per engine step, easy to add up over processes.

Knows no Prometheus. The engine link fills it, metrics.py exposes it.
"""

from bisect import bisect_left
from collections.abc import Sequence


class Buckets:
    """Counts per upper bound (inclusive), one more for what lies above, and the sum of the values."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Record `value`, `times` over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times
