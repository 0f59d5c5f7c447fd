"""The rows that terminal and page both show of an economics run. Formatting only."""

from headrace.loadtest.economics import Answer, Sheet, Source, gpus_for, sensitivity
from headrace.loadtest.economics_claims import DEEPINFER_CLAIM, DEEPSEEK_DAY_6, Claim, PublishedDay
from headrace.loadtest.show import dollars, number, percent

Rows = list[list[str]]
RANGE_HEAD = ("", "low", "middle", "high")
RESULTS = (
    ("gpu_hour", "a GPU hour", dollars),
    ("cost_input", "cost of a million input tokens, computed", dollars),
    ("cost_cached", "cost of a million input tokens, cached", dollars),
    ("cost_output", "cost of a million output tokens", dollars),
    ("cost_per_million", "cost of a million tokens of the mix", dollars),
    ("price_per_million", "what a million tokens of the mix brings", dollars),
    ("tokens", "tokens a day and GPU, all kinds", number),
    ("output_tokens", "output tokens a day and GPU", number),
    ("cost", "cost a day and GPU", dollars),
    ("revenue", "revenue a day and GPU", dollars),
    ("margin", "gross margin", percent),
    ("payback_days", "payback in days, if bought", number),
)


def result_rows(found: Answer, target: float) -> Rows:
    """Each result at the edges and in the middle, and the GPUs for a target."""
    rows = []
    for name, title, text in RESULTS:
        middle = getattr(found.middle, name)
        low, high = found.lowest[name], found.highest[name]
        shown = [text(low), text(middle), text(high)]
        if name == "payback_days":
            shown = [_days(low), _days(middle), _days(high)]
        rows.append([title, *shown])
    gpus = [
        gpus_for(target, tokens)
        for tokens in (found.highest["tokens"], found.middle.tokens, found.lowest["tokens"])
    ]
    rows.append([f"GPUs for {number(target)} tokens a day", *(number(round(count)) for count in gpus)])
    return rows


def _days(value: float | None) -> str:
    return "never" if value is None or value == float("inf") else number(value)


SENSITIVITY_HEAD = (
    "changed alone",
    "tokens/day",
    "$/M output",
    "$/M of the mix",
    "revenue/day",
    "margin",
    "payback",
)


def sensitivity_rows(source: Source, sheet: Sheet) -> Rows:
    return [
        [
            name,
            number(result.tokens),
            dollars(result.cost_output),
            dollars(result.cost_per_million),
            dollars(result.revenue),
            percent(result.margin),
            _days(result.payback_days),
        ]
        for name, _, result in sensitivity(source, sheet)
    ]


def day_rows(day: PublishedDay = DEEPSEEK_DAY_6) -> Rows:
    """The published day, recomputed: what, published or "", recomputed."""
    hit = day.cached_tokens / day.input_tokens
    decode_hours = day.output_tokens / day.decode_per_node / 3600
    prefill_hours = day.input_tokens / day.prefill_per_node / 3600
    return [
        ["GPUs", f"{day.nodes} nodes of {day.gpus_per_node}", number(day.gpus)],
        ["cost a day", dollars(day.published_cost), f"{dollars(day.cost)} at {dollars(day.hourly)}/h"],
        [
            "revenue a day, at list prices",
            dollars(day.published_revenue),
            f"{dollars(day.revenue)} (counts are rounded)",
        ],
        ["profit / cost", "545 %", percent(day.published_revenue / day.published_cost - 1)],
        ["gross margin", "", percent(day.margin)],
        ["cache hits", "56.3 %", percent(hit)],
        ["tokens a day, all kinds", "", number(day.tokens)],
        ["tokens a day and GPU", "", number(day.tokens / day.gpus)],
        ["tokens/s and GPU, all kinds", "", number(day.tokens_per_gpu_s)],
        ["cost of a million tokens", "", dollars(day.cost_per_million)],
        ["what a million tokens brings", "", dollars(day.price_per_million)],
        [
            "node hours at the published speeds",
            f"{number(day.prefill_per_node)} in, {number(day.decode_per_node)} out a second",
            f"{number(prefill_hours)} prefill + {number(decode_hours)} decode of {number(day.nodes * 24)}",
        ],
    ]


def claim_rows(claim: Claim = DEEPINFER_CLAIM) -> Rows:
    """What the claim's own totals say, before any assumption."""
    return [
        ["tokens a day", number(claim.tokens), "as claimed"],
        ["revenue a day", dollars(claim.revenue), "as claimed"],
        ["gross margin", percent(claim.margin), "as claimed"],
        ["payback", f"{claim.payback_days:g} days", "as claimed"],
        ["what a million tokens brings", dollars(claim.price_per_million), "revenue / tokens"],
        ["cost a day", dollars(claim.cost), "revenue x (1 - margin)"],
        ["cost of a million tokens", dollars(claim.cost / claim.tokens * 1e6), "cost / tokens"],
        ["hardware", dollars(claim.hardware), "payback days x gross profit a day"],
    ]


IMPLIED_HEAD = (
    "if a GPU costs",
    "GPUs",
    "tokens/s and GPU",
    "tokens/day and GPU",
    "then an hour",
    "then to buy",
)


def implied_rows(sheet: Sheet, claim: Claim = DEEPINFER_CLAIM) -> Rows:
    """What the claim needs of a GPU, by what a GPU costs."""
    rows = []
    hourly = sheet.hourly if sheet.hourly.mid else Sheet().hourly
    for by, span, unit in (("hourly", hourly, "an hour"), ("purchase", sheet.purchase, "to buy")):
        for price in dict.fromkeys((span.low, span.mid, span.high)):
            found = claim.implied(by, price)
            rows.append(
                [
                    f"{dollars(price)} {unit}",
                    number(round(found.gpus)),
                    number(found.tokens_per_gpu_s),
                    number(found.tokens_per_gpu_s * 86_400),
                    dollars(found.hourly),
                    dollars(found.purchase),
                ]
            )
    return rows


def distance(found: Answer, sheet: Sheet, claim: Claim = DEEPINFER_CLAIM) -> str:
    """How far the measurement is from the claim, in a sentence."""
    hourly = sheet.hourly if sheet.hourly.mid else Sheet().hourly
    needed = claim.needed(hourly, sheet.purchase)
    have = [
        value / 86_400 for value in (found.lowest["tokens"], found.middle.tokens, found.highest["tokens"])
    ]
    best, middle, worst = needed.low / have[2], needed.mid / have[1], needed.high / have[0]
    return (
        f"{claim.name} needs {number(needed.low)} to {number(needed.high)} tokens/s of each GPU "
        f"({number(needed.mid)} at {dollars(hourly.mid)}/h). Measured, under the assumptions above: {number(have[0])} "
        f"to {number(have[2])} ({number(have[1])}). The claim is {number(middle)} times that in the middle, "
        f"{number(best)} to {number(worst)} times at the edges."
    )
