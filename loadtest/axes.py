"""The axes of a plot: where a value lies between 0 and 1, and which values get a tick. Pure functions."""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

Format = Callable[[float], str]


@dataclass(frozen=True, slots=True)
class Axis:
    """`place` maps a value to 0..1 of the axis; values beyond its ends lie beyond."""

    label: str
    place: Callable[[float], float]
    ticks: tuple[tuple[float, str], ...]  # value, text


def linear(label: str, low: float, high: float, text: Format, count: int = 5) -> Axis:
    """Ticks at round numbers; both ends are moved out to one."""
    step = _round_step((high - low) / count if high > low else 1.0)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    last = max(last, first + 1)
    begin, span = first * step, (last - first) * step
    ticks = tuple((i * step, text(i * step)) for i in range(first, last + 1))
    return Axis(label, lambda value: (value - begin) / span, ticks)


def logarithmic(label: str, low: float, high: float, text: Format) -> Axis:
    """Ticks at powers of ten, at 1, 2 and 5 of each, or at round numbers, as the span wants. Ends are positive."""
    low, high = min(low, high) * 0.98, max(low * 1.1, high) * 1.02
    begin, span = math.log10(low), math.log10(high) - math.log10(low)
    if span < 0.8:
        step = _round_step((high - low) / 4)
        candidates = [i * step for i in range(math.ceil(low / step), math.floor(high / step) + 1)]
    else:
        steps = (1, 2, 5) if span < 2.5 else (1,)
        powers = range(math.floor(begin), math.ceil(begin + span) + 1)
        candidates = [step * 10.0**power for power in powers for step in steps]
    ticks = tuple((value, text(value)) for value in candidates if low * 0.999 <= value <= high * 1.001)
    return Axis(label, lambda value: (math.log10(max(value, 1e-12)) - begin) / span, ticks)


def tail(label: str, highest: float = 0.999) -> Axis:
    """Shares from 0 up, stretched towards 1: 0, 50, 90, 99, 99.9 %."""
    span = -math.log10(1 - highest)
    ticks = ((0.0, "0"), (0.5, "50 %"), (0.9, "90 %"), (0.99, "99 %"), (0.999, "99.9 %"))
    return Axis(label, lambda share: -math.log10(max(1 - share, 1e-9)) / span, ticks)


def bounds(values: Iterable[float], least: float = 0.0) -> tuple[float, float]:
    """The smallest and largest value, those up to `least` left out; (1, 10) if there are none."""
    found = [value for value in values if value > least]
    return (min(found), max(found)) if found else (1.0, 10.0)


def _round_step(raw: float) -> float:
    power = 10.0 ** math.floor(math.log10(raw))
    return next((step * power for step in (1, 2, 2.5, 5) if step * power >= raw * 0.999), 10 * power)
