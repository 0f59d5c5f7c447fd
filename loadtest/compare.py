"""Two load test records side by side: a table with ratios, and their plots laid over each other.

Runs are matched by their load; where that fails, the runs with the most output tokens a second are compared.
"""

from collections.abc import Callable
from html import escape

from rich.table import Table

from headrace.loadtest.page import note, page, plot, plots, table
from headrace.loadtest.plots import Named, gap_histogram, latency_cdf, over_time, pareto
from headrace.loadtest.record import LoadRecord, Run
from headrace.loadtest.show import number, percent, seconds

Figure = tuple[str, Callable[[Run], float | None], Callable[[float | None], str]]
FIGURES: tuple[Figure, ...] = (
    ("output tokens/s", lambda run: run.output_tokens_per_s, number),
    ("input tokens/s", lambda run: run.input_tokens_per_s, number),
    ("requests/s", lambda run: run.requests_per_s, number),
    ("tokens/s, median request", lambda run: run.interactivity, number),
    ("TTFT p50", lambda run: run.latencies["ttft"].p50_s, seconds),
    ("TTFT p99", lambda run: run.latencies["ttft"].p99_s, seconds),
    ("ITL p50", lambda run: run.latencies["itl"].p50_s, seconds),
    ("ITL p99", lambda run: run.latencies["itl"].p99_s, seconds),
    ("ITL p99.9", lambda run: run.latencies["itl"].p999_s, seconds),
    ("TPOT p50", lambda run: run.latencies["tpot"].p50_s, seconds),
    ("E2E p50", lambda run: run.latencies["e2e"].p50_s, seconds),
    ("E2E p99", lambda run: run.latencies["e2e"].p99_s, seconds),
    ("failed", lambda run: float(run.failed), number),
    ("SLO kept", lambda run: run.attainment, percent),
    ("client, of a core", lambda run: run.health.cpu_share, percent),
)


def matched(first: LoadRecord, second: LoadRecord) -> list[tuple[Run, Run]]:
    """Pairs of runs under the same load, else the best of each."""
    by_load = {run.load: run for run in second.runs}
    pairs = [(run, by_load[run.load]) for run in first.runs if run.load in by_load]
    return pairs or [(first.best, second.best)]


def compare_rows(a: Run, b: Run) -> list[list[str]]:
    """Figure, its value in both, and second / first."""
    rows = []
    for name, value, text in FIGURES:
        one, other = value(a), value(b)
        ratio = f"{other / one:.2f}x" if one and other is not None else "-"
        rows.append([name, text(one), text(other), ratio])
    return rows


def compare_table(first: LoadRecord, second: LoadRecord) -> Table:
    """For the terminal."""
    names = _names(first, second)
    drawn = Table("", *names, f"{names[1]} / {names[0]}", header_style="dim")
    for a, b in matched(first, second):
        drawn.add_section()
        drawn.add_row(_title(a, b), style="bold")
        for row in compare_rows(a, b):
            drawn.add_row(*row)
    return drawn


def compare_page(first: LoadRecord, second: LoadRecord) -> str:
    """A whole HTML document."""
    names = _names(first, second)
    body = [f"<h1>{escape(names[0])} and {escape(names[1])}</h1>", *_differences(first, second)]
    if len(first.runs) > 1 or len(second.runs) > 1:
        body.append(plot(pareto([first, second], names)))
    for a, b in matched(first, second):
        named: Named = [(names[0], a), (names[1], b)]
        body += [
            f"<h2>{escape(_title(a, b))}</h2>",
            table(("", *names, f"{names[1]} / {names[0]}"), compare_rows(a, b)),
            plots(
                [
                    latency_cdf("Time to first token", named, (("ttft", ""),)),
                    latency_cdf("End to end", named, (("e2e", ""),)),
                    latency_cdf("Between tokens, every gap", named, (("itl", ""),)),
                    gap_histogram(named),
                    over_time(named),
                ]
            ),
        ]
    return page(f"{names[0]} and {names[1]}", "\n".join(body))


def _names(first: LoadRecord, second: LoadRecord) -> tuple[str, str]:
    if first.name != second.name:
        return first.name, second.name
    return f"{first.name} (A)", f"{second.name} (B)"


def _title(a: Run, b: Run) -> str:
    return a.load if a.load == b.load else f"{a.load} against {b.load}"


def _differences(first: LoadRecord, second: LoadRecord) -> list[str]:
    """What was not equal although a comparison wants it to be."""
    found = []
    for name in ("workload", "api", "transport", "machine", "gpus"):
        one, other = getattr(first, name), getattr(second, name)
        if one != other:
            found.append(note(f"The {name} differs: {one} and {other}."))
    return found
