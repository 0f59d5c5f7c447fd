"""What one worker counted, as plain numbers that add up over workers and survive a worker's restart.

Knows no Prometheus and no files. metrics.py fills and shows it, peers.py carries it between processes.
"""

import json
from dataclasses import dataclass, field
from typing import Any

Key = tuple[str, ...]
"""Family name, then its label values in the family's order."""


class TallyError(ValueError):
    """The bytes are not a tally."""


@dataclass(slots=True)
class HistogramTally:
    """Counts per bucket (not cumulative, the last one without bound) and the sum of the values."""

    counts: list[int]
    total: float


@dataclass(slots=True)
class Tally:
    """Counters and histograms only grow; gauges count things that die with their worker."""

    counters: dict[Key, float] = field(default_factory=dict)
    histograms: dict[Key, HistogramTally] = field(default_factory=dict)
    gauges: dict[Key, float] = field(default_factory=dict)

    def count(self, value: float, *key: str) -> None:
        self.counters[key] = self.counters.get(key, 0) + value

    def gauge(self, value: float, *key: str) -> None:
        self.gauges[key] = self.gauges.get(key, 0) + value

    def histogram(self, counts: list[int], total: float, *key: str) -> None:
        known = self.histograms.get(key)
        if known is None:
            self.histograms[key] = HistogramTally(list(counts), total)
        else:
            known.counts = [a + b for a, b in zip(known.counts, counts, strict=True)]
            known.total += total

    def add(self, other: "Tally") -> None:
        """Sum in place, key by key."""
        for key, value in other.counters.items():
            self.count(value, *key)
        for key, value in other.gauges.items():
            self.gauge(value, *key)
        for key, histogram in other.histograms.items():
            self.histogram(histogram.counts, histogram.total, *key)

    def to_json(self) -> bytes:
        return json.dumps(
            {
                "counters": [[key, value] for key, value in self.counters.items()],
                "gauges": [[key, value] for key, value in self.gauges.items()],
                "histograms": [[key, h.counts, h.total] for key, h in self.histograms.items()],
            }
        ).encode()

    @staticmethod
    def from_json(data: bytes) -> "Tally":
        """Read what `to_json` wrote.

        Raises:
            TallyError: it is something else, or cut short.
        """
        try:
            tree: Any = json.loads(data)
            return Tally(
                {_key(key): float(value) for key, value in tree["counters"]},
                {
                    _key(key): HistogramTally([int(count) for count in counts], float(total))
                    for key, counts, total in tree["histograms"]
                },
                {_key(key): float(value) for key, value in tree["gauges"]},
            )
        except (ValueError, TypeError, KeyError) as error:
            raise TallyError(f"not a tally: {error}") from error


def _key(parts: Any) -> Key:
    return tuple(str(part) for part in parts)
