"""Turns a drafter's confidence into the probability that its draft is accepted, learned while serving.

Knows no tensors and no requests. The speculator asks it before a step and tells it after; the planner works
with its answers, which never change what is emitted, only how much is tried.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass

MAX_DEPTH = 8  # deeper drafts share the numbers of this depth
_MEMORY = 400.0  # records of one bin that count
_PRIOR_WEIGHT = 6.0  # records that the prior is worth
_UNKNOWN = 0.6  # what is believed of a draft without any record
_NO_VOTE = 0.3  # records that a bin without any is worth beside others
_HALF_LIFE = 4000  # steps after which a bin without records counts half
_REFRESH = 16  # records between two looks at the counts


@dataclass(frozen=True, slots=True)
class Scale:
    """How a drafter's confidences are divided, and what to believe of each bin before any record.

    Bin i holds the confidences in edges[i - 1] <= c < edges[i]; there is one bin more than edges.
    """

    edges: tuple[float, ...]  # rising
    prior: tuple[float, ...]  # rising


# The drafter's own probability of its token: finer where it is sure, as most drafts of worth are.
PROBABILITY = Scale(
    edges=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.87, 0.92, 0.96, 0.98, 0.99, 0.997),
    prior=(0.1, 0.2, 0.3, 0.4, 0.45, 0.55, 0.6, 0.7, 0.8, 0.85, 0.9, 0.93, 0.95, 0.97, 0.98),
)
# Length of a repeated phrase, in tokens.
MATCH_LENGTH = Scale(
    edges=(2, 3, 4, 5, 6, 8, 11, 16, 24, 32),
    prior=(0.2, 0.3, 0.4, 0.5, 0.55, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9),
)
SCALES: Mapping[str, Scale] = {"ngram": MATCH_LENGTH}


class Calibration:
    """Acceptance by drafter, depth and bin of confidence.

    Each bin counts drafts and accepted drafts; old records fade, a bin's newest few hundred count, and one that
    sees none fades over thousands of steps to its prior, so that a drafter which did badly is tried again. The
    bins' shares are then made to rise with confidence by isotonic regression weighted by records (pool adjacent
    violators): where a bin has few records its neighbours outvote it, where it has many it stands for itself
    and draws thin neighbours along. Memory is bounded: names times depths times bins.

    Args:
        scales: by drafter; others are taken to state probabilities.
    """

    def __init__(self, scales: Mapping[str, Scale] = SCALES) -> None:
        self._scales = scales
        self._curves: dict[tuple[str, int], _Curve] = {}
        self._steps = 0

    def probability(self, drafter: str, depth: int, confidence: float) -> float:
        """That draft `depth` (1 = the first) is accepted, given that those before it are."""
        return self._curve(drafter, depth).read(confidence, self._steps)

    def average(self, drafter: str, depth: int) -> float:
        """The same of a draft of which nothing is known but its depth."""
        return self._curve(drafter, depth).average(self._steps)

    def record(self, drafter: str, depth: int, confidence: float, accepted: bool) -> None:
        """Draft `depth` was verified. To be told only if all before it were accepted."""
        self._curve(drafter, depth).record(confidence, accepted, self._steps)

    def step(self) -> None:
        """A step went by: the clock by which what is not seen fades."""
        self._steps += 1

    def _curve(self, drafter: str, depth: int) -> "_Curve":
        key = (drafter, min(depth, MAX_DEPTH))
        curve = self._curves.get(key)
        if curve is None:
            curve = self._curves[key] = _Curve(self._scales.get(drafter, PROBABILITY))
        return curve


class _Curve:
    """One drafter at one depth."""

    def __init__(self, scale: Scale) -> None:
        self._scale = scale
        bins = len(scale.prior)
        self._tried = [0.0] * bins
        self._accepted = [0.0] * bins
        self._seen = [0] * bins  # step of the newest record
        self._values = list(scale.prior)
        self._stale = 0  # records that `_values` does not know
        self._fresh_until = _HALF_LIFE // 8

    def read(self, confidence: float, step: int) -> float:
        if self._stale >= _REFRESH or step >= self._fresh_until:
            self._refresh(step)
        return self._values[bisect_right(self._scale.edges, confidence)]

    def average(self, step: int) -> float:
        faded = [self._faded(at, step) for at in range(len(self._tried))]
        tried = sum(count * share for count, share in zip(self._tried, faded, strict=True))
        accepted = sum(count * share for count, share in zip(self._accepted, faded, strict=True))
        return (accepted + _UNKNOWN * _PRIOR_WEIGHT) / (tried + _PRIOR_WEIGHT)

    def record(self, confidence: float, accepted: bool, step: int) -> None:
        at = bisect_right(self._scale.edges, confidence)
        keep = (1 - 1 / _MEMORY) * self._faded(at, step)
        self._tried[at] = self._tried[at] * keep + 1
        self._accepted[at] = self._accepted[at] * keep + accepted
        self._seen[at] = step
        self._stale += 1

    def _faded(self, at: int, step: int) -> float:
        return float(0.5 ** ((step - self._seen[at]) / _HALF_LIFE))

    def _refresh(self, step: int) -> None:
        runs: list[tuple[float, float, int]] = []  # mean, weight, bins
        for at, prior in enumerate(self._scale.prior):
            faded = self._faded(at, step)
            tried = self._tried[at] * faded
            mean = (self._accepted[at] * faded + prior * _PRIOR_WEIGHT) / (tried + _PRIOR_WEIGHT)
            # Among bins only records have a vote, or many priors would outvote one well-known bin.
            weight, count = tried + _NO_VOTE, 1
            while runs and runs[-1][0] > mean:
                before, heavy, bins = runs.pop()
                mean = (before * heavy + mean * weight) / (heavy + weight)
                weight, count = heavy + weight, bins + count
            runs.append((mean, weight, count))
        self._values = [mean for mean, _, count in runs for _ in range(count)]
        self._stale, self._fresh_until = 0, step + _HALF_LIFE // 8
