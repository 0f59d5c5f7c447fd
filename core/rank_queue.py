"""Requests in the scheduler's total order: (promoted, priority, arrival).

Owns the order of those who wait and of those who run. Knows neither blocks nor states. Called by
core/scheduler.py.
"""

from bisect import bisect_left, insort
from collections.abc import Iterator

from headrace.core.request import Request


class RankQueue:
    """A list sorted by rank, best first. Ranks are unique, so a request is found by bisection."""

    __slots__ = ("_items",)

    def __init__(self) -> None:
        self._items: list[Request] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._items)

    @property
    def first(self) -> Request:
        return self._items[0]

    @property
    def last(self) -> Request:
        return self._items[-1]

    def snapshot(self) -> tuple[Request, ...]:
        """For loops that may add or remove."""
        return tuple(self._items)

    def add(self, request: Request) -> None:
        insort(self._items, request, key=_rank)

    def remove(self, request: Request) -> None:
        index = bisect_left(self._items, request.rank, key=_rank)
        assert self._items[index] is request, f"{request} is not where its rank says"
        del self._items[index]

    def promote_oldest(self) -> None:
        """Put the request that arrived first ahead of every class."""
        if not self._items:
            return
        oldest = min(self._items, key=_sequence)
        if oldest is not self._items[0]:
            self.remove(oldest)
            oldest.promote()
            self.add(oldest)

    def check_integrity(self) -> None:
        ranks = [request.rank for request in self._items]
        assert ranks == sorted(set(ranks)), "the queue is out of order"


def _rank(request: Request) -> tuple[int, int, int]:
    return request.rank


def _sequence(request: Request) -> int:
    return request.rank[2]
