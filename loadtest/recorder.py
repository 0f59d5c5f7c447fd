"""Turns finished exchanges into figures. Folded in batches, because per request numpy costs more than it gives.

Knows no client; driver.py adds exchanges and asks for the run at its end.
"""

from collections import Counter
from dataclasses import dataclass
from math import inf

import numpy as np
from numpy.typing import NDArray

from headrace.loadtest.exchange import Exchange
from headrace.loadtest.histogram import Histogram
from headrace.loadtest.record import Series
from headrace.loadtest.slo import Slo

BATCH = 256
MAX_BUCKETS = 100_000  # later ones count for the last
CUT = "cut"  # the error of an exchange that was running when the run was ended: nobody's fault
LATENCIES = ("ttft", "ttft_sent", "itl", "tpot", "e2e", "e2e_sent")


@dataclass(frozen=True, slots=True)
class Window:
    """Seconds of perf_counter. Tokens count by arrival, requests by their intended time."""

    start: float  # of the run
    begin: float  # after the warm-up
    end: float = inf

    def holds(self, times: NDArray[np.float64]) -> NDArray[np.bool_]:
        return (times >= self.begin) & (times < self.end)


class Recorder:
    """The figures of one run.

    Args:
        window: what counts.
        slo: what a good request keeps.
        bucket_s: of the series over time.
    """

    def __init__(self, window: Window, slo: Slo, bucket_s: float = 0.5) -> None:
        self.latencies = {name: Histogram() for name in LATENCIES}
        self.late = Histogram()  # from intended to sent
        self.requests = 0
        self.failed = 0
        self.cut = 0
        self.good = 0
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.input_tokens = 0  # of requests whose first token came within the window
        self.output_tokens = 0.0  # that came within the window
        self.ended_within = 0  # requests without error that ended within the window
        self.good_within = 0
        self.errors: Counter[str] = Counter()
        self.error_samples: dict[str, str] = {}
        self.tokens_by_usage = True
        self.last_end = window.begin  # of a request that counts
        self._events = 0
        self._tokens = 0.0
        self._window = window
        self._slo = slo
        self._bucket_s = bucket_s
        self._batch: list[Exchange] = []
        self._token_buckets = np.zeros(1)
        self._ended_buckets = np.zeros(1)
        self._open_buckets = np.zeros(1)  # +1 where a request begins, -1 where it ends

    def add(self, exchange: Exchange) -> None:
        """An exchange has ended."""
        self._batch.append(exchange)
        if len(self._batch) >= BATCH:
            self.fold()

    def fold(self) -> None:
        """Bring the figures up to date."""
        batch, self._batch = self._batch, []
        if not batch:
            return
        intended = np.array([exchange.intended for exchange in batch])
        counted = self._window.holds(intended)
        for exchange, counts in zip(batch, counted, strict=True):
            if counts:
                self._count(exchange)
        ok = counted & np.array([not exchange.error for exchange in batch])
        self._fold_times(batch, intended, counted, ok)

    @property
    def num_events(self) -> int:
        """Events that brought text, so far."""
        return self._events

    @property
    def tokens_per_event(self) -> float | None:
        """Tokens that one event brought, on average."""
        return self._tokens / self._events if self._events else None

    def series(self) -> Series:
        """The run over time."""
        return Series(
            bucket_s=self._bucket_s,
            output_tokens=tuple(np.round(self._token_buckets, 3).tolist()),
            ended=tuple(self._ended_buckets.astype(int).tolist()),
            open=tuple(np.cumsum(self._open_buckets).astype(int).tolist()),
        )

    def _count(self, exchange: Exchange) -> None:
        if exchange.error == CUT:
            self.cut += 1
            return
        self.requests += 1
        self.last_end = max(self.last_end, exchange.ended)
        self.prompt_tokens += exchange.prompt_tokens
        self.cached_tokens += exchange.cached_tokens
        if exchange.error:
            self.failed += 1
            self.errors[exchange.error] += 1
            self.error_samples.setdefault(exchange.error, exchange.detail)
        elif exchange.output_tokens is None:
            self.tokens_by_usage = False

    def _fold_times(
        self,
        batch: list[Exchange],
        intended: NDArray[np.float64],
        counted: NDArray[np.bool_],
        ok: NDArray[np.bool_],
    ) -> None:
        sent = np.array([exchange.sent for exchange in batch])
        ended = np.array([exchange.ended for exchange in batch])
        events = np.array([len(exchange.arrivals) for exchange in batch])
        tokens = np.array([exchange.tokens for exchange in batch], np.float64)
        times = np.concatenate([np.array(exchange.arrivals) for exchange in batch])
        owner = np.repeat(np.arange(len(batch)), events)
        weights = np.repeat(tokens / np.maximum(events, 1), events)
        self._add_series(times, weights, sent, ended)
        self.output_tokens += float(weights[self._window.holds(times)].sum())
        self._events += int(events.sum())
        self._tokens += float(tokens[events > 0].sum())

        inside = owner[1:] == owner[:-1]
        gaps, gap_owner = np.diff(times)[inside], owner[1:][inside]
        last = np.cumsum(events) - 1
        spoke = events > 0
        first_at, last_at = np.full(len(batch), np.nan), np.full(len(batch), np.nan)
        first_at[spoke], last_at[spoke] = times[(last - events + 1)[spoke]], times[last[spoke]]
        with np.errstate(divide="ignore", invalid="ignore"):
            tpot = np.where((tokens > 1) & (events > 1), (last_at - first_at) / (tokens - 1), np.nan)

        self.late.add((sent - intended)[counted & (sent > 0)])
        found = self.latencies
        found["ttft"].add((first_at - intended)[ok & spoke])
        found["ttft_sent"].add((first_at - sent)[ok & spoke])
        found["e2e"].add((ended - intended)[ok])
        found["e2e_sent"].add((ended - sent)[ok])
        found["tpot"].add(tpot[ok & ~np.isnan(tpot)])
        found["itl"].add(gaps[ok[gap_owner]])
        good = ok & self._keeps(first_at - intended, ended - intended, tpot, gaps, gap_owner)
        within = self._window.holds(ended) & np.array([not exchange.error for exchange in batch])
        prompts = np.array([exchange.prompt_tokens for exchange in batch])
        self.good += int(good.sum())
        self.good_within += int((good & within).sum())
        self.ended_within += int(within.sum())
        self.input_tokens += int(prompts[self._window.holds(first_at)].sum())

    def _keeps(
        self,
        ttft: NDArray[np.float64],
        e2e: NDArray[np.float64],
        tpot: NDArray[np.float64],
        gaps: NDArray[np.float64],
        gap_owner: NDArray[np.intp],
    ) -> NDArray[np.bool_]:
        """Which requests keep the SLO; what a request does not have, it cannot break."""
        slo = self._slo
        keeps = np.ones(len(ttft), np.bool_)
        for limit, values in ((slo.ttft, ttft), (slo.e2e, e2e), (slo.tpot, tpot)):
            if limit is not None:
                keeps &= ~(values > limit)
        if slo.itl is not None:
            total = np.bincount(gap_owner, minlength=len(ttft))
            late = np.bincount(gap_owner[gaps > slo.itl], minlength=len(ttft))
            keeps &= late <= 0.01 * total
        return keeps

    def _add_series(
        self,
        times: NDArray[np.float64],
        weights: NDArray[np.float64],
        sent: NDArray[np.float64],
        ended: NDArray[np.float64],
    ) -> None:
        took_part = sent > 0
        begun, over = self._buckets(sent[took_part]), self._buckets(ended[took_part])
        tokens = self._buckets(times)
        size = max(int(found.max(initial=0)) + 1 for found in (begun, over, tokens))
        size = max(size, len(self._token_buckets))
        self._token_buckets = _grown(self._token_buckets, size) + np.bincount(tokens, weights, size)
        self._ended_buckets = _grown(self._ended_buckets, size) + np.bincount(over, minlength=size)
        changes = np.bincount(begun, minlength=size) - np.bincount(over, minlength=size)
        self._open_buckets = _grown(self._open_buckets, size) + changes

    def _buckets(self, times: NDArray[np.float64]) -> NDArray[np.int64]:
        index = ((times - self._window.start) / self._bucket_s).astype(np.int64)
        return np.clip(index, 0, MAX_BUCKETS - 1)


def _grown(buckets: NDArray[np.float64], size: int) -> NDArray[np.float64]:
    return np.concatenate([buckets, np.zeros(size - len(buckets))])
