"""The plots of load test records: distributions, the run over time, throughput against interactivity.

Reads records, draws with svg.py. Each function takes any number of named runs, so one record and two look alike.
"""

from collections.abc import Sequence

import numpy as np

from headrace.loadtest.axes import bounds, linear, logarithmic, tail
from headrace.loadtest.histogram import Histogram
from headrace.loadtest.record import LoadRecord, Run
from headrace.loadtest.show import number, short_percent, short_seconds
from headrace.loadtest.svg import Bars, Chart, Line

MAX_POINTS = 400
Named = Sequence[tuple[str, Run]]


def latency_cdf(title: str, named: Named, latencies: Sequence[tuple[str, str]]) -> str:
    """Share of values at most so long; latencies are (key, name), a key ending in _sent is dashed."""
    lines = []
    for run_index, (run_name, run) in enumerate(named):
        for index, (key, name) in enumerate(latencies):
            points = _thinned(Histogram.from_data(run.latencies[key].histogram).cdf())
            sent = key.endswith("_sent")
            color = run_index if len(named) > 1 else index - sent
            dashed = sent or (len(named) > 1 and index > 0)
            label = f"{run_name} {name}".strip()
            lines.append(Line(name=label, points=points, color=color, dashed=dashed, steps=True))
    low, high = bounds((x for line in lines for x, _ in line.points), 1e-6)
    x = logarithmic("time", low, high, short_seconds)
    return Chart(title=title, x=x, y=tail("share at most so long"), lines=lines).svg()


def gap_histogram(named: Named) -> str:
    """How many gaps between events are how long, on a logarithmic axis."""
    histograms = [Histogram.from_data(run.latencies["itl"].histogram) for _, run in named]
    low, high = bounds((x for histogram in histograms for x, _ in histogram.cdf()), 1e-6)
    edges = np.geomspace(low * 0.98, high * 1.02, 61)
    bars, lines, most = [], [], 0.0
    for index, ((name, _), histogram) in enumerate(zip(named, histograms, strict=True)):
        values = np.array(histogram.cdf()).reshape(-1, 2)
        counts = histogram.counts[histogram.counts > 0]
        heights, _ = np.histogram(values[:, 0], edges, weights=counts)
        shares = heights / max(1, len(histogram))
        most = max(most, float(shares.max(initial=0)))
        if len(named) == 1:
            bars.append(Bars(name=name, edges=edges.tolist(), heights=shares.tolist()))
        else:
            points = list(zip(edges[:-1].tolist(), shares.tolist(), strict=True))
            lines.append(Line(name=name, points=points, color=index, steps=True))
    return Chart(
        title="Gaps between events (ITL)",
        x=logarithmic("gap", float(edges[0]), float(edges[-1]), short_seconds),
        y=linear("share of all gaps", 0, most or 1, short_percent),
        bars=bars,
        lines=lines,
    ).svg()


def over_time(named: Named) -> str:
    """Output tokens per second, from the start."""
    lines = []
    for index, (name, run) in enumerate(named):
        series = run.series
        group = max(1, len(series.output_tokens) // MAX_POINTS)
        width = series.bucket_s * group
        tokens = _grouped(series.output_tokens, group)
        points = [((i + 0.5) * width, total / width) for i, total in enumerate(tokens)]
        lines.append(Line(name=name, points=points, color=index))
    longest = max((line.points[-1][0] for line in lines if line.points), default=1.0)
    most = max((y for line in lines for _, y in line.points), default=1.0)
    return Chart(
        title="Output tokens per second",
        x=linear("time since the start", 0, longest, short_seconds),
        y=linear("tokens/s", 0, most, number),
        lines=lines,
    ).svg()


def open_requests(named: Named) -> str:
    """Requests in flight."""
    lines = []
    for index, (name, run) in enumerate(named):
        group = max(1, len(run.series.open) // MAX_POINTS)
        width = run.series.bucket_s * group
        points = [
            ((i + 1) * width, float(count)) for i, count in enumerate(run.series.open[group - 1 :: group])
        ]
        lines.append(Line(name=name, points=[(0.0, 0.0), *points], color=index, steps=True))
    longest = max(line.points[-1][0] for line in lines)
    most = max(y for line in lines for _, y in line.points)
    return Chart(
        title="Requests in flight",
        x=linear("time since the start", 0, longest, short_seconds),
        y=linear("requests", 0, max(most, 1), number),
        lines=lines,
    ).svg()


def pareto(records: Sequence[LoadRecord], names: Sequence[str] = ()) -> str:
    """Throughput against what one user sees; up and to the right is better. Client-limited runs are marked (c).

    Args:
        names: of the records, if not their own.
    """
    lines = []
    per_gpu = all(record.gpus for record in records)
    for index, record in enumerate(records):
        points, labels = [], []
        for run in sorted(record.runs, key=lambda run: (run.users, run.rate)):
            if run.interactivity is None:
                continue
            points.append((run.interactivity, run.output_tokens_per_s / (record.gpus if per_gpu else 1)))
            labels.append(run.load.removesuffix(" Poisson") + (" (c)" if run.health.reasons else ""))
        name = names[index] if names else record.name
        lines.append(Line(name=name, points=points, color=index, dots=True, labels=labels))
    values = [point for line in lines for point in line.points]
    fastest = max((x for x, _ in values), default=1.0)
    most = max((y for _, y in values), default=1.0)
    return Chart(
        title="Throughput against interactivity",
        x=linear("output tokens per second of the median request", 0, fastest, number),
        y=linear("output tokens/s" + (" per GPU" if per_gpu else ""), 0, most, number),
        lines=lines,
    ).svg()


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MAX_POINTS of them, the ends kept."""
    if len(points) <= MAX_POINTS:
        return list(points)
    keep = sorted({round(i * (len(points) - 1) / (MAX_POINTS - 1)) for i in range(MAX_POINTS)})
    return [points[i] for i in keep]


def _grouped(values: Sequence[float], size: int) -> list[float]:
    return [sum(values[i : i + size]) for i in range(0, len(values), size)]
