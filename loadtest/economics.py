"""What a token costs and earns: arithmetic only, every input named. Money is US dollars, prices per million tokens.

A GPU second computes either `prefill` input tokens or `decode` output tokens; a mix shares it. Knows no record and
no page: economics_source.py measures, economics_page.py shows.
"""

from dataclasses import dataclass, fields, replace
from itertools import product

DAY_S = 86_400
HOURS_A_YEAR = 8_760
MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Range:
    """An assumption: what it may be, and what is taken for the middle."""

    low: float
    mid: float
    high: float

    @staticmethod
    def point(value: float) -> "Range":
        """Known exactly."""
        return Range(value, value, value)

    @property
    def is_point(self) -> bool:
        return self.low == self.high


@dataclass(frozen=True, slots=True, kw_only=True)
class Values:
    """One value for each assumption. What is bought is written off over its life; what is rented has `hourly`."""

    hourly: float  # $ per GPU hour, all in; 0 = bought, see below
    purchase: float  # $ per GPU, its share of host and network included
    life_years: float
    power_kw: float  # drawn per GPU, its share of the host included
    pue: float  # power of the building over power of the machines
    kwh: float  # $ per kilowatt hour
    overhead: float  # $ per GPU hour of bought ones: space, staff, repairs
    utilisation: float  # of the measured throughput, averaged over the day
    input_per_output: float  # tokens
    cache_hit: float  # share of input tokens found in a cache
    decode_weight: float  # GPU time of an output token over that of a computed input token
    cached_weight: float  # the same for a cached input token
    price_input: float  # $ per million
    price_cached: float
    price_output: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """The assumptions, each a range. The defaults are examples; a price sheet replaces them."""

    hourly: Range = Range(1.5, 2.0, 3.5)
    purchase: Range = Range(25_000, 35_000, 45_000)
    life_years: Range = Range(3, 4, 5)
    power_kw: Range = Range(0.9, 1.1, 1.3)
    pue: Range = Range(1.1, 1.25, 1.5)
    kwh: Range = Range(0.05, 0.08, 0.15)
    overhead: Range = Range(0.1, 0.3, 0.6)
    utilisation: Range = Range(0.3, 0.5, 0.8)
    input_per_output: Range = Range(2.0, 3.6, 6.0)
    cache_hit: Range = Range(0.3, 0.56, 0.8)
    decode_weight: Range = Range(2.0, 4.0, 8.0)
    cached_weight: Range = Range(0.0, 0.05, 0.15)
    price_input: Range = Range(0.55, 0.55, 0.55)
    price_cached: Range = Range(0.14, 0.14, 0.14)
    price_output: Range = Range(2.19, 2.19, 2.19)

    def middle(self) -> Values:
        return Values(**{entry.name: getattr(self, entry.name).mid for entry in fields(self)})

    def corners(self) -> list[Values]:
        """Every combination of low and high. Results are linear-fractional in each assumption, so none lies outside."""
        open_ = [entry.name for entry in fields(self) if not getattr(self, entry.name).is_point]
        ends = [(getattr(self, name).low, getattr(self, name).high) for name in open_]
        return [replace(self.middle(), **dict(zip(open_, chosen, strict=True))) for chosen in product(*ends)]


@dataclass(frozen=True, slots=True)
class Speed:
    """What one GPU does when it does only one thing: tokens per second, fully used."""

    prefill: float  # input tokens computed
    decode: float  # output tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Per GPU and day unless it says otherwise."""

    gpu_hour: float  # $
    cost_input: float  # $ per million computed input tokens
    cost_cached: float
    cost_output: float
    tokens: float  # of all kinds
    input_tokens: float  # cached ones included
    output_tokens: float
    cost: float  # $
    revenue: float
    margin: float  # gross: (revenue - cost) / revenue
    payback_days: float | None  # of the purchase, from what is left after running costs; None = never
    cost_per_million: float  # $ per million tokens of all kinds
    price_per_million: float  # $ that a million tokens of all kinds brings


def gpu_hour(values: Values) -> float:
    """$ of one GPU hour: the rent, or write-off plus running costs."""
    if values.hourly:
        return values.hourly
    return values.purchase / (values.life_years * HOURS_A_YEAR) + running_hour(values)


def running_hour(values: Values) -> float:
    """$ per hour to run a GPU that is paid for."""
    return values.power_kw * values.pue * values.kwh + values.overhead


def evaluate(speed: Speed, values: Values) -> Result:
    """All results for one choice of values."""
    hour = gpu_hour(values)
    hit = values.cache_hit
    # GPU seconds for one output token and the input tokens that come with it
    per_output = 1 / speed.decode
    per_output += values.input_per_output * (1 - hit + hit * values.cached_weight) / speed.prefill
    output = DAY_S * values.utilisation / per_output
    inputs = output * values.input_per_output
    revenue = output * values.price_output + inputs * (
        (1 - hit) * values.price_input + hit * values.price_cached
    )
    revenue /= MILLION
    cost = 24 * hour
    left = revenue - 24 * running_hour(values)
    second = hour / 3600 / values.utilisation
    tokens = output + inputs
    return Result(
        gpu_hour=hour,
        cost_input=second / speed.prefill * MILLION,
        cost_cached=second / speed.prefill * values.cached_weight * MILLION,
        cost_output=second / speed.decode * MILLION,
        tokens=tokens,
        input_tokens=inputs,
        output_tokens=output,
        cost=cost,
        revenue=revenue,
        margin=(revenue - cost) / revenue if revenue else float("-inf"),
        payback_days=values.purchase / left if left > 0 else None,
        cost_per_million=cost / tokens * MILLION,
        price_per_million=revenue / tokens * MILLION,
    )


@dataclass(frozen=True, slots=True)
class Source:
    """A measurement, as far as it goes; the assumptions fill in the rest.

    A mixed load gives `mixed` alone, an engine benchmark `decode`, perhaps `prefill` too.
    """

    name: str
    prefill: float | None  # input tokens per second and GPU
    decode: float | None  # output tokens per second and GPU
    mixed: tuple[float, float, float] | None = (
        None  # computed input, cached input, output tokens per second and GPU
    )

    def speed(self, values: Values) -> Speed:
        """The two speeds under these values: what was not measured follows from the weights."""
        if self.mixed is not None:
            computed, cached, output = self.mixed
            prefill = computed + cached * values.cached_weight + output * values.decode_weight
            return Speed(prefill, prefill / values.decode_weight)
        assert self.decode is not None
        return Speed(self.prefill or self.decode * values.decode_weight, self.decode)


@dataclass(frozen=True, slots=True)
class Answer:
    """Results in the middle and at the edges of the assumptions."""

    middle: Result
    lowest: dict[str, float]
    highest: dict[str, float]  # payback that never comes = infinity


def answer(source: Source, sheet: Sheet) -> Answer:
    """Evaluate the middle and every corner."""
    middle = sheet.middle()
    results = [evaluate(source.speed(values), values) for values in (middle, *sheet.corners())]
    lowest, highest = {}, {}
    for entry in fields(Result):
        values = [getattr(result, entry.name) for result in results]
        found = [float("inf") if value is None else float(value) for value in values]
        lowest[entry.name], highest[entry.name] = min(found), max(found)
    return Answer(results[0], lowest, highest)


def gpus_for(target_tokens: float, tokens_per_gpu: float) -> float:
    """GPUs that make so many tokens a day."""
    return target_tokens / tokens_per_gpu


def swings(source: Source, sheet: Sheet, result: str) -> list[tuple[str, float, float]]:
    """What each assumption does alone: its name, the result at its low and at its high end; the largest first."""
    middle = sheet.middle()
    found = []
    for entry in fields(sheet):
        span: Range = getattr(sheet, entry.name)
        if span.is_point:
            continue
        ends = []
        for end in (span.low, span.high):
            values = replace(middle, **{entry.name: end})
            ends.append(float(getattr(evaluate(source.speed(values), values), result)))
        if ends[0] != ends[1]:
            found.append((entry.name, ends[0], ends[1]))
    return sorted(found, key=lambda swing: -abs(swing[1] - swing[2]))


def sensitivity(source: Source, sheet: Sheet) -> list[tuple[str, Values, Result]]:
    """One assumption changed at a time, the others in the middle: utilisation, prices, cache hits."""
    middle = sheet.middle()
    cases = [
        (f"utilisation {share:.0%}", replace(middle, utilisation=share))
        for share in (0.2, 0.4, 0.6, 0.8, 1.0)
    ]
    for factor in (0.25, 0.5, 1.0, 2.0):
        priced = replace(
            middle,
            price_input=middle.price_input * factor,
            price_cached=middle.price_cached * factor,
            price_output=middle.price_output * factor,
        )
        cases.append((f"token prices x {factor:g}", priced))
    cases += [
        (f"cache hits {share:.0%}", replace(middle, cache_hit=share)) for share in (0.0, 0.25, 0.5, 0.75, 0.9)
    ]
    return [(name, values, evaluate(source.speed(values), values)) for name, values in cases]
