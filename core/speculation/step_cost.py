"""How long a step of so many query tokens takes: measured at start, corrected while running.

Knows no device. Built by whoever timed the steps, read by the planner, told by the engine.
"""

from bisect import bisect_left
from collections.abc import Iterable

_RATE = 0.05  # share of an error that one observation moves
_CLIP = 3.0  # an observation counts as no further off than so many typical errors
_LISTED = 4096  # query tokens up to which a look-up is quick
_LOWEST, _HIGHEST = 0.25, 8.0  # bounds of the corrected curve, over the measured one


class StepCost:
    """A curve through measured points, linear between them, never falling.

    What running steps tell is kept as an offset of the whole curve (longer contexts lift all of it) and one of
    each point. An observation moves both by a small share of its error, which is clipped at a few typical errors:
    one outlier moves nothing much, and a lasting change is followed within some dozens of steps.

    Args:
        points: (query tokens, milliseconds), in any order; several of one size are averaged.
        padded: steps are padded to the next size of the points, as recorded graphs are: a staircase up to the
            last point. Beyond it, and without this, the curve is linear.
    """

    def __init__(self, points: Iterable[tuple[int, float]], *, padded: bool = False) -> None:
        by_size: dict[int, list[float]] = {}
        for size, ms in points:
            by_size.setdefault(size, []).append(ms)
        assert by_size
        self._padded = padded
        self._sizes = sorted(by_size)
        means = [sum(by_size[size]) / len(by_size[size]) for size in self._sizes]
        self._measured = _never_falling(means)
        self._shift = 0.0
        self._shifts = [0.0] * len(self._sizes)
        self._deviation = 0.05 * self._measured[-1]
        self._curve = list(self._measured)
        # Of each number of query tokens: the point at or below it, and how far it is on the way to the next.
        self._left: list[int] = []
        self._share: list[float] = []
        for size in range(min(self._sizes[-1], _LISTED) + 1):
            near = self._near(size)
            self._left.append(near[0][0])
            self._share.append(near[1][1] if len(near) > 1 else 0.0)

    def ms(self, query_tokens: int) -> float:
        """Predicted time of a step. The planner asks hundreds of times a step."""
        if query_tokens >= len(self._left):
            return self._beyond(query_tokens)
        at, share = self._left[query_tokens], self._share[query_tokens]
        value = self._curve[at]
        return value + share * (self._curve[at + 1] - value) if share else value

    def observe(self, query_tokens: int, ms: float) -> None:
        """A step of so many query tokens took `ms`."""
        error = ms - self.ms(query_tokens)
        clipped = max(-_CLIP * self._deviation, min(_CLIP * self._deviation, error))
        floor = 0.01 * self.ms(query_tokens)
        self._deviation = max(floor, self._deviation + _RATE * (abs(clipped) - self._deviation))
        self._shift += _RATE * clipped
        for at, share in self._near(query_tokens):
            self._shifts[at] += _RATE * share * clipped
        bounded = []
        for at, measured in enumerate(self._measured):
            low, high = (_LOWEST - 1) * measured, (_HIGHEST - 1) * measured
            # Bounding what is kept, not only what is read: a bound is left as soon as the errors turn.
            self._shifts[at] = max(low - self._shift, min(high - self._shift, self._shifts[at]))
            bounded.append(measured + self._shift + self._shifts[at])
        self._curve = _never_falling(bounded)

    def _near(self, query_tokens: int) -> list[tuple[int, float]]:
        """The points that tell the time of such a step, and how much of it each tells."""
        right = bisect_left(self._sizes, query_tokens)
        if right == len(self._sizes):
            return [(right - 1, 1.0)]
        if right == 0 or self._padded or self._sizes[right] == query_tokens:
            return [(right, 1.0)]
        span = self._sizes[right] - self._sizes[right - 1]
        share = (query_tokens - self._sizes[right - 1]) / span
        return [(right - 1, 1 - share), (right, share)]

    def _beyond(self, query_tokens: int) -> float:
        sizes, curve = self._sizes, self._curve
        if query_tokens <= sizes[-1]:
            return sum(share * curve[at] for at, share in self._near(query_tokens))
        if len(sizes) == 1:
            return curve[0]
        slope = (curve[-1] - curve[-2]) / (sizes[-1] - sizes[-2])
        return curve[-1] + slope * (query_tokens - sizes[-1])


def _never_falling(values: list[float]) -> list[float]:
    """The nearest sequence that never falls, by least squares: neighbours that fall share their mean."""
    runs: list[tuple[float, int]] = []  # mean, length
    for value in values:
        mean, length = value, 1
        while runs and runs[-1][0] > mean:
            before, count = runs.pop()
            mean, length = (before * count + mean * length) / (count + length), count + length
        runs.append((mean, length))
    return [mean for mean, length in runs for _ in range(length)]
