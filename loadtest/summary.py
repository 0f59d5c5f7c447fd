"""The figures of a record for the terminal, and the rows that report.py shows in HTML too. Knows rich."""

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from headrace.loadtest.record import LoadRecord, Run
from headrace.loadtest.show import number, percent, seconds

NAMES = {
    "ttft": "TTFT",
    "ttft_sent": "TTFT as sent",
    "itl": "ITL",
    "tpot": "TPOT",
    "e2e": "E2E",
    "e2e_sent": "E2E as sent",
}
QUANTILE_NAMES = ("mean", "p50", "p90", "p99", "p99.9", "max")
RUN_HEAD = (
    "load",
    "out tok/s",
    "tok/s a user",
    "req/s",
    "TTFT p50",
    "p99",
    "ITL p50",
    "p99",
    "failed",
    "SLO kept",
)


def latency_rows(run: Run) -> list[list[str]]:
    """Name, then the quantiles, then the count, for each distribution."""
    rows = []
    for name, title in NAMES.items():
        found = run.latencies[name]
        values = (found.mean_s, found.p50_s, found.p90_s, found.p99_s, found.p999_s, found.max_s)
        rows.append([title, *(seconds(value) for value in values), number(found.count)])
    return rows


def run_rows(record: LoadRecord) -> list[list[str]]:
    """One row of figures for each run; the columns of RUN_HEAD."""
    return [
        [
            run.load,
            number(run.output_tokens_per_s),
            number(run.interactivity),
            number(run.requests_per_s),
            seconds(run.latencies["ttft"].p50_s),
            seconds(run.latencies["ttft"].p99_s),
            seconds(run.latencies["itl"].p50_s),
            seconds(run.latencies["itl"].p99_s),
            number(run.failed),
            percent(run.attainment),
        ]
        for run in record.runs
    ]


def summary(record: LoadRecord) -> RenderableType:
    """Figures, errors, and whether the client was the limit."""
    parts: list[RenderableType] = []
    if len(record.runs) == 1:
        (run,) = record.runs
        parts += [Text(_figures(run), "bold"), _table(("", *QUANTILE_NAMES, "count"), latency_rows(run))]
    else:
        parts.append(_table(RUN_HEAD, run_rows(record)))
    for run in record.runs:
        for kind, count in run.errors.items():
            parts.append(Text(f"{run.load}: {count} x {kind}: {run.error_samples.get(kind, '')}", "red"))
        if run.health.reasons:
            parts.append(Text(f"{run.load}: the client may have been the limit: {reasons(run)}", "yellow"))
        if run.cut:
            parts.append(Text(f"{run.load}: {run.cut} requests still ran at the end and were cut"))
    if not all(run.tokens_by_usage for run in record.runs):
        parts.append(
            Text("the server did not report usage for every request: there, each event counts as a token")
        )
    if record.found_rate is not None:
        parts.append(Text(f"highest rate that kept the SLO: {number(record.found_rate)} sessions/s", "bold"))
    return Group(*parts)


def reasons(run: Run) -> str:
    """Why the client may have been the limit."""
    return "; ".join(run.health.reasons)


def _figures(run: Run) -> str:
    kept = f"; {percent(run.attainment)} kept {run.slo}, {number(run.goodput_per_s)}/s" if run.slo else ""
    return (
        f"{run.load}: {number(run.output_tokens_per_s)} output and {number(run.input_tokens_per_s)} input tokens/s, "
        f"{number(run.requests_per_s)} requests/s, {number(run.requests)} requests, {number(run.failed)} failed{kept}"
    )


def _table(head: tuple[str, ...], rows: list[list[str]]) -> Table:
    table = Table(header_style="dim", box=None, padding=(0, 1, 0, 0))
    for index, name in enumerate(head):
        table.add_column(name, justify="right" if index else "left", no_wrap=not index)
    for row in rows:
        table.add_row(*row)
    return table
