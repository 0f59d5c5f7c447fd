"""Counts of durations in buckets that grow with the value: any quantile within 0.5 %, in 20 kB, mergeable.

Buckets are those of DDSketch (Masson, Rim and Lee, 2019). Knows no units but seconds.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

ERROR = 0.005  # of a quantile, relative
SMALLEST = 1e-6  # seconds; all below is one bucket
LARGEST = 1e5
_GAMMA = (1 + ERROR) / (1 - ERROR)
_LOG_GAMMA = math.log(_GAMMA)
_SIZE = math.ceil(math.log(LARGEST / SMALLEST) / _LOG_GAMMA) + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramData:
    """A histogram in a record: the buckets that are not empty."""

    buckets: tuple[int, ...]
    counts: tuple[int, ...]
    total_s: float  # sum of the values
    smallest_s: float
    largest_s: float


class Histogram:
    """Durations in seconds. Negative ones count as 0, those above 10^5 s as 10^5 s."""

    def __init__(self) -> None:
        self.counts: NDArray[np.int64] = np.zeros(_SIZE, np.int64)
        self.total = 0.0
        self.smallest = math.inf
        self.largest = 0.0

    def __len__(self) -> int:
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """NaN when empty."""
        return self.total / len(self) if len(self) else math.nan

    def add(self, seconds: ArrayLike) -> None:
        """Count one value or many.

        Args:
            seconds: a number or an array of any shape.
        """
        values = np.clip(np.asarray(seconds, np.float64).ravel(), 0.0, LARGEST)
        if not values.size:
            return
        self.counts += np.bincount(_bucket(values), minlength=_SIZE)
        self.total += float(values.sum())
        self.smallest = min(self.smallest, float(values.min()))
        self.largest = max(self.largest, float(values.max()))

    def merge(self, other: "Histogram") -> None:
        """Add another's counts."""
        self.counts += other.counts
        self.total += other.total
        self.smallest = min(self.smallest, other.smallest)
        self.largest = max(self.largest, other.largest)

    def quantile(self, q: float) -> float:
        """The value of rank ceil(q n), within 0.5 %; NaN when empty."""
        count = len(self)
        if not count:
            return math.nan
        rank = max(1, math.ceil(q * count - 1e-9))
        index = int(np.searchsorted(np.cumsum(self.counts), rank))
        return min(max(_middle(index), self.smallest), self.largest)

    def cdf(self) -> list[tuple[float, float]]:
        """Points (seconds, share of values at most so long), one for each bucket in use."""
        used = np.flatnonzero(self.counts)
        shares = np.cumsum(self.counts[used]) / max(1, len(self))
        return [(_middle(int(i)), float(share)) for i, share in zip(used, shares, strict=True)]

    def to_data(self) -> HistogramData:
        """What a record keeps."""
        used = np.flatnonzero(self.counts)
        return HistogramData(
            buckets=tuple(used.tolist()),
            counts=tuple(self.counts[used].tolist()),
            total_s=self.total,
            smallest_s=0.0 if math.isinf(self.smallest) else self.smallest,
            largest_s=self.largest,
        )

    @staticmethod
    def from_data(data: HistogramData) -> "Histogram":
        """The inverse of `to_data`.

        Raises:
            ValueError: the buckets are none of this kind of histogram.
        """
        histogram = Histogram()
        if len(data.buckets) != len(data.counts):
            raise ValueError("a histogram has as many counts as buckets")
        if not _all_within(data.buckets, _SIZE) or any(count < 0 for count in data.counts):
            raise ValueError("a histogram has a bucket or a count out of range")
        histogram.counts[list(data.buckets)] = data.counts
        histogram.total = data.total_s
        histogram.smallest = data.smallest_s if data.counts else math.inf
        histogram.largest = data.largest_s
        return histogram


def _bucket(values: NDArray[np.float64]) -> NDArray[np.int64]:
    """Bucket i > 0 holds SMALLEST * (gamma^(i-1), gamma^i]; bucket 0 what is smaller."""
    logs = np.log(np.maximum(values, SMALLEST) / SMALLEST) / _LOG_GAMMA
    index: NDArray[np.int64] = np.ceil(logs - 1e-9).astype(np.int64)
    return index


def _middle(index: int) -> float:
    """The value that is at most ERROR away from all of the bucket's."""
    return SMALLEST * 2 * _GAMMA**index / (_GAMMA + 1) if index else SMALLEST


def _all_within(indices: Sequence[int], size: int) -> bool:
    return all(0 <= index < size for index in indices)
