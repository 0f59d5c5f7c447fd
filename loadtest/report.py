"""The page of one load test record. Knows records and plots; cli.py writes it to a file."""

from html import escape

from headrace.loadtest.page import note, page, plot, plots, table, tiles, warning
from headrace.loadtest.plots import gap_histogram, latency_cdf, open_requests, over_time, pareto
from headrace.loadtest.record import LoadRecord, Run
from headrace.loadtest.show import number, percent, seconds
from headrace.loadtest.summary import QUANTILE_NAMES, RUN_HEAD, latency_rows, reasons, run_rows

HOW = (
    "TTFT is the time to the first event that brings text, ITL every gap between two such events, TPOT a request's "
    "mean time per output token after the first, E2E the time to its last byte. All but those \u201cas sent\u201d "
    "count from the moment the request should have been sent, so that a client or server that falls behind cannot "
    "hide it. Quantiles are within 0.5 %. Failed requests count against the SLO and are not in the latencies. With "
    "ITL in the SLO, 99 % of a request's gaps must keep it."
)


def report_page(record: LoadRecord) -> str:
    """A whole HTML document."""
    best = record.best
    body = [
        f"<h1>{escape(record.name)}</h1>",
        f'<p class="soft">{escape(record.workload)}. {escape(record.api)} API over {record.transport.upper()}, '
        f"{escape(record.url)}, {escape(best.started)}</p>",
    ]
    body += [
        warning(f"{run.load}: the client may have been the limit: {reasons(run)}.")
        for run in record.runs
        if run.health.reasons
    ]
    if record.found_rate is not None:
        body.append(f"<h2>Highest rate that kept the SLO: {number(record.found_rate)} sessions/s</h2>")
    body.append(tiles(_tiles(record, best)))
    if len(record.runs) > 1:
        body.append("<h2>All runs</h2>")
        body.append(plot(pareto([record])))
        body.append(table(RUN_HEAD, run_rows(record)))
        for run in record.runs:
            opened = " open" if run is best else ""
            body.append(f"<details{opened}><summary>{escape(run.load)}</summary>{_run(run)}</details>")
    else:
        body += [f"<h2>{escape(best.load)}</h2>", _run(best)]
    body += ["<h2>How this was measured</h2>", note(HOW), _client(record)]
    return page(f"{record.name}: load test", "\n".join(body))


def _tiles(record: LoadRecord, run: Run) -> list[tuple[str, str]]:
    ttft, itl = run.latencies["ttft"], run.latencies["itl"]
    entries = [
        (number(run.output_tokens_per_s), "output tokens/s"),
        (number(run.interactivity), "tokens/s, median request"),
        (number(run.requests_per_s), "requests/s"),
        (seconds(ttft.p50_s), "TTFT p50"),
        (seconds(ttft.p99_s), "TTFT p99"),
        (seconds(itl.p50_s), "ITL p50"),
        (seconds(itl.p99_s), "ITL p99"),
        (number(run.failed), f"failed of {number(run.requests)}"),
    ]
    if run.slo:
        entries.append((percent(run.attainment), f"kept {run.slo}"))
        entries.append((number(run.goodput_per_s), "goodput, requests/s"))
    if record.gpus:
        entries.append((number(run.output_tokens_per_s / record.gpus), "output tokens/s per GPU"))
    return entries


def _run(run: Run) -> str:
    named = [("", run)]
    parts = [
        plots(
            [
                latency_cdf(
                    "Time to first token", named, (("ttft", "from intended time"), ("ttft_sent", "as sent"))
                ),
                latency_cdf("End to end", named, (("e2e", "from intended time"), ("e2e_sent", "as sent"))),
                latency_cdf(
                    "Between tokens", named, (("itl", "every gap"), ("tpot", "mean of a request (TPOT)"))
                ),
                gap_histogram(named),
                over_time(named),
                open_requests(named),
            ]
        ),
        table(("latency", *QUANTILE_NAMES, "count"), latency_rows(run)),
        note(_counts(run)),
    ]
    if run.errors:
        rows = [[kind, number(count), run.error_samples.get(kind, "")] for kind, count in run.errors.items()]
        parts += ["<h3>Errors</h3>", table(("kind", "count", "for example"), rows, texts=(2,))]
    return "\n".join(parts)


def _counts(run: Run) -> str:
    """What else was counted, in sentences."""
    cached = f", {number(run.cached_tokens)} of them cached" if run.cached_tokens else ""
    sentences = [
        f"{number(run.requests)} requests in {seconds(run.window_s)}, {number(run.failed)} failed, "
        f"{number(run.cut)} cut at the end; {number(run.prompt_tokens)} prompt tokens{cached}, "
        f"{number(run.output_tokens)} output tokens."
    ]
    if run.tokens_per_event is not None and abs(run.tokens_per_event - 1) > 0.005:
        sentences.append(f"An event brought {run.tokens_per_event:.2f} tokens on average.")
    if not run.tokens_by_usage:
        sentences.append(
            "The server did not report usage for every request; there, each event counts as a token."
        )
    return " ".join(sentences)


def _client(record: LoadRecord) -> str:
    rows = [
        [
            run.load,
            seconds(run.health.lag_p50_s),
            seconds(run.health.lag_p99_s),
            seconds(run.health.late_p50_s),
            seconds(run.health.late_p99_s),
            percent(run.health.cpu_share),
            number(run.health.connections),
        ]
        for run in record.runs
    ]
    head = ("the client itself", "loop lag p50", "p99", "sent late p50", "p99", "of a core", "connections")
    software = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    where = f"{record.machine}; {software}" + (f"; commit {record.commit}" if record.commit else "")
    return table(head, rows) + note(where)
