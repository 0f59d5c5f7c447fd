"""Numbers for people: durations, counts, money, each with three significant figures and a unit. Pure functions."""

from math import isfinite


def seconds(value: float | None) -> str:
    """12.3 ms, 1.24 s, 85 us; a dash for what was not measured."""
    if value is None or not isfinite(value):
        return "-"
    if value >= 60:
        return f"{value / 60:.1f} min"
    if value >= 1:
        return f"{_three(value)} s"
    if value >= 1e-3:
        return f"{_three(value * 1e3)} ms"
    return f"{_three(value * 1e6)} us" if value else "0"


def short_seconds(value: float) -> str:
    """As `seconds`, without zeros behind the point: for the ticks of an axis."""
    figure, _, unit = seconds(value).partition(" ")
    return f"{figure.rstrip('0').rstrip('.') if '.' in figure else figure} {unit}".strip()


def number(value: float | None) -> str:
    """1,234 or 0.123 or 155T."""
    if value is None or not isfinite(value):
        return "-"
    if abs(value) < 1e5:
        return f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else _three(value)
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return _three(value / size) + unit
    raise AssertionError(value)


def dollars(value: float | None) -> str:
    """$0.142, $87,072, $1.43B."""
    if value is None or not isfinite(value):
        return "-"
    sign, size = ("-" if value < 0 else ""), abs(value)
    if size >= 1e6:
        return f"{sign}${number(size)}"
    if size >= 100:
        return f"{sign}${size:,.0f}"
    return f"{sign}${size:.2f}" if size >= 1 else f"{sign}${_three(size)}"


def percent(value: float | None) -> str:
    """99.2 %."""
    return "-" if value is None or not isfinite(value) else f"{_three(value * 100)} %"


def short_percent(value: float) -> str:
    """For the ticks of an axis."""
    return f"{value * 100:.3g} %"


def _three(value: float) -> str:
    """Three significant figures, no exponent."""
    if not value:
        return "0"
    size = abs(value)
    places = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 else 3
    if size < 0.1:
        return f"{value:.3g}"
    return f"{value:,.{places}f}"
