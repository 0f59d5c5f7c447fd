"""What a load test found, as a typed record in one JSON file; its schema has a number.

Knows no client and no plot. recorder.py makes runs, report.py and compare.py read them.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.config import ConfigError
from headrace.loadtest.histogram import Histogram, HistogramData
from headrace.loadtest.typed_json import build

SCHEMA = 1
QUANTILES = {"p50_s": 0.5, "p90_s": 0.9, "p99_s": 0.99, "p999_s": 0.999}


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """A distribution of durations; figures are None where nothing was counted."""

    count: int
    mean_s: float | None
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None
    p999_s: float | None
    max_s: float | None
    histogram: HistogramData

    @staticmethod
    def of(histogram: Histogram) -> "Latency":
        figures = {name: _finite(histogram.quantile(q)) for name, q in QUANTILES.items()}
        return Latency(
            count=len(histogram),
            mean_s=_finite(histogram.mean),
            max_s=histogram.largest if len(histogram) else None,
            histogram=histogram.to_data(),
            **figures,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """The run over time, in buckets of `bucket_s`, from its start (warm-up included)."""

    bucket_s: float
    output_tokens: tuple[float, ...]
    ended: tuple[int, ...]  # requests
    open: tuple[int, ...]  # requests, at the bucket's end


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """Whether the load generator kept up."""

    lag_p50_s: float | None  # by how much its event loop was late
    lag_p99_s: float | None
    late_p50_s: float | None  # from intended to actual sending
    late_p99_s: float | None
    cpu_share: float  # of one core
    connections: int
    reasons: tuple[str, ...]  # why the client may have been the limit; empty = it was not


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One load, held for a while. Requests count if they were to be sent within the window."""

    load: str  # for people
    users: int  # closed loop; 0 = open
    rate: float  # open loop, sessions per second; 0 = closed, or a trace's own times
    started: str  # UTC, ISO 8601
    window_s: float  # without warm-up
    requests: int  # those that ended, failed ones included
    failed: int
    cut: int  # still running when the run was ended
    errors: Mapping[str, int]  # by kind
    error_samples: Mapping[str, str]  # one message of each kind
    prompt_tokens: int  # of requests counted
    cached_tokens: int
    output_tokens: float  # that arrived within the window
    requests_per_s: float
    input_tokens_per_s: float
    output_tokens_per_s: float
    tokens_by_usage: bool  # token counts are the server's; else events were counted
    tokens_per_event: float | None
    latencies: Mapping[str, Latency]  # ttft, ttft_sent, itl, tpot, e2e, e2e_sent
    slo: str  # "" = none
    good: int  # requests that kept it
    attainment: float | None  # good / requests
    goodput_per_s: float | None  # good requests per second
    interactivity: float | None  # output tokens per second that the median request saw: 1 / TPOT
    series: Series
    health: Health


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadRecord:
    """One invocation."""

    schema: int
    name: str
    url: str
    model: str
    api: str  # chat | completion
    transport: str  # sse | ws
    workload: str  # for people
    gpus: int  # behind the server, as told; 0 = not told
    runs: tuple[Run, ...]
    found_rate: float | None  # of --find-rate: the highest that kept the SLO
    versions: Mapping[str, str]
    machine: str
    commit: str

    @property
    def best(self) -> Run:
        """The run at the rate that was found, if one was looked for; else that with the most output tokens a second."""
        found = [run for run in self.runs if run.rate == self.found_rate] if self.found_rate else []
        return max(found or self.runs, key=lambda run: run.output_tokens_per_s)


def save(record: LoadRecord, path: Path) -> None:
    """Write the file; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(record)) + "\n")


def load(path: Path) -> LoadRecord:
    """Read what `save` wrote.

    Raises:
        ConfigError: not readable, no record, or of another schema.
    """
    try:
        data: Any = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"record {path}: {error}") from None
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        found = data.get("schema") if isinstance(data, dict) else None
        raise ConfigError(f"record {path} has schema {found}, this version reads {SCHEMA}")
    try:
        record = build(LoadRecord, data)
        for run in record.runs:
            for latency in run.latencies.values():
                Histogram.from_data(latency.histogram)
    except ValueError as error:
        raise ConfigError(f"record {path}: {error}") from None
    if not record.runs:
        raise ConfigError(f"record {path} has no runs")
    return record


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
