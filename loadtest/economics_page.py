"""The page of an economics run: results with their ranges, what moves them, published figures beside."""

from collections.abc import Callable
from dataclasses import replace
from html import escape

from headrace.loadtest.axes import Axis, linear, logarithmic
from headrace.loadtest.economics import Answer, Sheet, Source, evaluate, swings
from headrace.loadtest.economics_claims import DEEPINFER_CLAIM, DEEPSEEK_DAY_6
from headrace.loadtest.economics_sheet import MEANING, assumptions
from headrace.loadtest.economics_tables import (
    IMPLIED_HEAD,
    RANGE_HEAD,
    SENSITIVITY_HEAD,
    claim_rows,
    day_rows,
    distance,
    implied_rows,
    result_rows,
    sensitivity_rows,
)
from headrace.loadtest.page import note, page, plots, table, tiles
from headrace.loadtest.show import dollars, number, percent, short_percent
from headrace.loadtest.svg import Band, Chart, Line

LEAST_MARGIN = -1.0  # of the plots: below, a service loses more than it earns


def economics_page(source: Source | None, sheet: Sheet, found: Answer | None, target: float) -> str:
    """A whole HTML document; without a source, the published figures alone."""
    body = ["<h1>What a token costs</h1>"]
    if source is not None and found is not None:
        body += _measured(source, sheet, found, target)
    body += _published(source, sheet, found)
    return page("What a token costs", "\n".join(body))


def _measured(source: Source, sheet: Sheet, found: Answer, target: float) -> list[str]:
    middle = found.middle
    speed = source.speed(sheet.middle())
    return [
        f'<p class="soft">From {escape(source.name)}: {number(speed.prefill)} input or {number(speed.decode)} output '
        "tokens/s of one GPU, fully used.</p>",
        tiles(
            [
                (dollars(middle.cost_output), "a million output tokens cost"),
                (dollars(middle.cost_input), "a million input tokens cost"),
                (number(middle.tokens), "tokens a day and GPU"),
                (percent(middle.margin), "gross margin"),
                (dollars(middle.revenue), "revenue a day and GPU"),
                (dollars(middle.gpu_hour), "a GPU hour"),
            ]
        ),
        "<h2>Results</h2>",
        table(RANGE_HEAD, result_rows(found, target)),
        note(
            "Low and high are the extremes over every combination of the assumptions below, not likely values."
        ),
        "<h2>What moves them</h2>",
        plots([_swing_plot(source, sheet), _margin_plot(source, sheet)]),
        "<p></p>",
        table(SENSITIVITY_HEAD, sensitivity_rows(source, sheet)),
        note("Per GPU. One assumption is changed at a time; the others stay in the middle."),
        "<h2>Assumptions</h2>",
        table(("assumption", "low", "middle", "high", "meaning"), assumptions(sheet), texts=(4,)),
    ]


def _published(source: Source | None, sheet: Sheet, found: Answer | None) -> list[str]:
    body = [
        "<h2>Beside published figures</h2>",
        plots([_tokens_plot(source, sheet, found), _price_plot(found)]),
    ]
    if found is not None:
        body.append(f"<p>{escape(distance(found, sheet))}</p>")
    body += [
        f"<h2>{escape(DEEPSEEK_DAY_6.name)}, recomputed</h2>",
        table(("", "published", "recomputed"), day_rows(), texts=(1, 2)),
        note(DEEPSEEK_DAY_6.source + "."),
        "<h2>155 trillion tokens a day, $22M, 80 %, 81 days</h2>",
        "<p>A claim about DeepInfer without a published configuration. Its own totals say:</p>",
        table(("", "figure", "how"), claim_rows(), texts=(2,)),
        "<p>How many GPUs that is depends on what a GPU costs, and so does what each one must do:</p>",
        table(IMPLIED_HEAD, implied_rows(sheet)),
    ]
    return body


def _swing_plot(source: Source, sheet: Sheet) -> str:
    """Each assumption alone, from its low to its high end: what it does to the cost of the mix."""
    cost = evaluate(source.speed(sheet.middle()), sheet.middle()).cost_per_million
    found = swings(source, sheet, "cost_per_million")[:8]
    bands, ticks = [], []
    for index, (name, low, high) in enumerate(found):
        place = len(found) - index
        bands.append(
            Band(
                y=place,
                low=min(low, high),
                mark=cost,
                high=max(low, high),
                title=f"{MEANING[name]}: {dollars(low)} to {dollars(high)}",
            )
        )
        ticks.append((float(place), name))
    ends = [end for _, low, high in found for end in (low, high)] or [cost]
    return Chart(
        title="Cost of a million tokens of the mix, one assumption at a time",
        x=linear("$ per million tokens", 0, max(ends), dollars),
        y=_rows_axis(ticks),
        bands=bands,
        marks=((cost, f"middle {dollars(cost)}"),),
        left=132,
    ).svg()


def _margin_plot(source: Source, sheet: Sheet) -> str:
    """Gross margin by utilisation, at several levels of token prices."""
    middle = sheet.middle()
    lines = []
    for index, factor in enumerate((0.25, 0.5, 1.0, 2.0)):
        points = []
        for percentage in range(2, 101, 2):
            values = replace(
                middle,
                utilisation=percentage / 100,
                price_input=middle.price_input * factor,
                price_cached=middle.price_cached * factor,
                price_output=middle.price_output * factor,
            )
            margin = evaluate(source.speed(values), values).margin
            if margin >= LEAST_MARGIN:
                points.append((percentage / 100, margin))
        lines.append(Line(name=f"prices x {factor:g}", points=points, color=index))
    return Chart(
        title="Gross margin by utilisation",
        x=linear("share of the measured throughput, averaged over a day", 0, 1, short_percent),
        y=linear("gross margin", LEAST_MARGIN, 1, short_percent),
        lines=lines,
    ).svg()


def _tokens_plot(source: Source | None, sheet: Sheet, found: Answer | None) -> str:
    hourly = sheet.hourly if sheet.hourly.mid else Sheet().hourly
    needed = DEEPINFER_CLAIM.needed(hourly, sheet.purchase)
    day = DEEPSEEK_DAY_6.tokens_per_gpu_s
    rows = [
        ("the claim needs", needed.low, needed.mid, needed.high, 1),
        ("DeepSeek, day 6", day, day, day, 2),
    ]
    if source is not None and found is not None:
        low, mid, high = (
            value / 86_400 for value in (found.lowest["tokens"], found.middle.tokens, found.highest["tokens"])
        )
        rows.append(("measured", low, mid, high, 0))
    return _band_plot("Tokens per second and GPU, all kinds, over a day", "tokens/s and GPU", rows, number)


def _price_plot(found: Answer | None) -> str:
    claim, day = DEEPINFER_CLAIM, DEEPSEEK_DAY_6
    claimed = claim.cost / claim.tokens * 1e6
    rows = [
        ("claim: cost", claimed, claimed, claimed, 1),
        ("claim: brings", claim.price_per_million, claim.price_per_million, claim.price_per_million, 1),
        ("day 6: cost", day.cost_per_million, day.cost_per_million, day.cost_per_million, 2),
        ("day 6: brings", day.price_per_million, day.price_per_million, day.price_per_million, 2),
    ]
    if found is not None:
        for name, title in (
            ("cost_per_million", "measured: cost"),
            ("price_per_million", "measured: brings"),
        ):
            rows.append((title, found.lowest[name], getattr(found.middle, name), found.highest[name], 0))
    return _band_plot(
        "A million tokens of the mix: what it costs, what it brings", "$ per million tokens", rows, dollars
    )


def _band_plot(
    title: str, label: str, rows: list[tuple[str, float, float, float, int]], text: Callable[[float], str]
) -> str:
    bands, ticks = [], []
    for index, (name, low, mid, high, color) in enumerate(rows):
        words = text(mid) if low == high else f"{text(low)} to {text(high)}, middle {text(mid)}"
        bands.append(Band(y=index + 1, low=low, mark=mid, high=high, color=color, title=f"{name}: {words}"))
        ticks.append((float(index + 1), name))
    values = [value for _, low, _, high, _ in rows for value in (low, high) if 0 < value < float("inf")]
    x = logarithmic(label, min(values) / 1.3, max(values) * 1.3, text)
    return Chart(title=title, x=x, y=_rows_axis(ticks), bands=bands, left=132).svg()


def _rows_axis(ticks: list[tuple[float, str]]) -> Axis:
    span = len(ticks) + 0.5
    return Axis("", lambda value: (value - 0.25) / span, tuple(ticks))
