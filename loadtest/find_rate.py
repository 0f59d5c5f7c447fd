"""The search for the highest rate that keeps an SLO: doubling until it breaks, then halving the interval.

Knows no server: whoever calls measures a rate.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

MAX_MEASURES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What is looked for, and how exactly."""

    first: float = 1.0  # sessions per second
    attainment: float = 0.99  # share of requests that must keep the SLO
    precision: float = 0.05  # the answer is at most so much below the first rate that broke it


async def find_rate(measure: Callable[[float], Awaitable[float | None]], search: Search) -> float | None:
    """The highest rate measured that keeps the SLO, None if not even the lowest tried does.

    Args:
        measure: holds a rate for a while; the share of good requests, None = there were none.
        search: where to begin and when to end.
    """
    kept: float | None = None
    broken: float | None = None
    rate = search.first
    for _ in range(MAX_MEASURES):
        share = await measure(rate)
        if share is not None and share >= search.attainment:
            kept = rate
        else:
            broken = rate
        if kept is None:
            rate /= 2
        elif broken is None:
            rate *= 2
        elif broken / kept <= 1 + search.precision:
            return kept
        else:
            rate = (kept * broken) ** 0.5
    return kept
