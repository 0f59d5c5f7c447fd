"""Published figures as worked examples: DeepSeek's day-6 account of a day, and a claim without a configuration.

Figures as published; everything else is arithmetic on them, so that a measurement can be laid beside.
"""

from dataclasses import dataclass

from headrace.loadtest.economics import DAY_S, MILLION, Range


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedDay:
    """A day of a service whose owner gave the counts."""

    name: str
    source: str
    nodes: float  # on average over the day
    gpus_per_node: int
    hourly: float  # $ per GPU hour, as they assumed
    input_tokens: float  # cached ones included
    cached_tokens: float
    output_tokens: float
    price_input: float  # $ per million
    price_cached: float
    price_output: float
    published_cost: float  # $
    published_revenue: float
    prefill_per_node: float  # tokens/s of a prefill node, cached ones included
    decode_per_node: float  # tokens/s of a decode node

    @property
    def gpus(self) -> float:
        return self.nodes * self.gpus_per_node

    @property
    def tokens(self) -> float:
        return self.input_tokens + self.output_tokens

    @property
    def cost(self) -> float:
        """$ of the day, recomputed."""
        return self.gpus * 24 * self.hourly

    @property
    def revenue(self) -> float:
        """$ of the day at list prices, recomputed from the rounded counts."""
        computed = self.input_tokens - self.cached_tokens
        earned = computed * self.price_input + self.cached_tokens * self.price_cached
        return (earned + self.output_tokens * self.price_output) / MILLION

    @property
    def margin(self) -> float:
        """Gross, on the published figures."""
        return 1 - self.published_cost / self.published_revenue

    @property
    def tokens_per_gpu_s(self) -> float:
        """Of all kinds, averaged over the day and over all GPUs."""
        return self.tokens / self.gpus / DAY_S

    @property
    def cost_per_million(self) -> float:
        return self.published_cost / self.tokens * MILLION

    @property
    def price_per_million(self) -> float:
        return self.published_revenue / self.tokens * MILLION


DEEPSEEK_DAY_6 = PublishedDay(
    name="DeepSeek, day 6",
    source="DeepSeek-V3/R1 inference system overview (open-infra-index, day 6): 24 h of 27-28 February 2025, H800",
    nodes=226.75,
    gpus_per_node=8,
    hourly=2.0,
    input_tokens=608e9,
    cached_tokens=342e9,
    output_tokens=168e9,
    price_input=0.55,
    price_cached=0.14,
    price_output=2.19,
    published_cost=87_072,
    published_revenue=562_027,
    prefill_per_node=73_700,
    decode_per_node=14_800,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Totals without a configuration: how many GPUs, which prices and which mix are not said."""

    name: str
    tokens: float  # a day, of all kinds
    revenue: float  # $ a day
    margin: float
    payback_days: float

    @property
    def price_per_million(self) -> float:
        """$ that a million tokens of all kinds brings."""
        return self.revenue / self.tokens * MILLION

    @property
    def cost(self) -> float:
        """$ a day."""
        return self.revenue * (1 - self.margin)

    @property
    def hardware(self) -> float:
        """$ that the gross profit pays back in the days claimed."""
        return self.revenue * self.margin * self.payback_days

    def implied(self, by: str, price: float) -> "Implied":
        """What follows if a GPU costs `price`: $ per hour with by = "hourly", $ to buy with by = "purchase"."""
        gpus = self.cost / 24 / price if by == "hourly" else self.hardware / price
        return Implied(
            by=by,
            price=price,
            gpus=gpus,
            tokens_per_gpu_s=self.tokens / gpus / DAY_S,
            hourly=self.cost / 24 / gpus,
            purchase=self.hardware / gpus,
        )

    def needed(self, hourly: Range, purchase: Range) -> Range:
        """Tokens per second and GPU that the claim needs: over both ways to count GPUs; the middle is by rent."""
        found = [
            self.implied("hourly", value).tokens_per_gpu_s for value in (hourly.low, hourly.mid, hourly.high)
        ]
        bought = [self.implied("purchase", value).tokens_per_gpu_s for value in (purchase.low, purchase.high)]
        return Range(min(found + bought), found[1], max(found + bought))


@dataclass(frozen=True, slots=True, kw_only=True)
class Implied:
    """A claim, once a price of a GPU is assumed."""

    by: str
    price: float
    gpus: float
    tokens_per_gpu_s: float
    hourly: float  # $ that a GPU hour may then cost
    purchase: float  # $ that a GPU may then cost to buy


DEEPINFER_CLAIM = Claim(
    name="The DeepInfer claim",
    tokens=155e12,
    revenue=22e6,
    margin=0.8,
    payback_days=81,
)
