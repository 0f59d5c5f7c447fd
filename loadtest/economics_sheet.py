"""The price sheet: a TOML file, or NAME=VALUE on the command line, over the defaults. Says what each entry means.

A value is a number, or a range [low, middle, high].
"""

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from headrace.config import ConfigError
from headrace.loadtest.economics import Range, Sheet
from headrace.loadtest.show import number

MEANING = {
    "hourly": "rent of a GPU, $/h, all in (0 = bought)",
    "purchase": "price of a GPU with its share of the host, $",
    "life_years": "years until it is written off",
    "power_kw": "power per GPU, host included, kW",
    "pue": "power of the building over that of the machines",
    "kwh": "electricity, $/kWh",
    "overhead": "space, staff, repairs of a bought GPU, $/h",
    "utilisation": "share of the measured throughput over a day",
    "input_per_output": "input tokens per output token",
    "cache_hit": "share of input tokens found in a cache",
    "decode_weight": "GPU time of an output token / of an input token",
    "cached_weight": "GPU time of a cached / of a computed input token",
    "price_input": "$ per million input tokens",
    "price_cached": "$ per million cached input tokens",
    "price_output": "$ per million output tokens",
}
_SHARES = ("utilisation", "cache_hit", "cached_weight")
_MAY_BE_ZERO = ("hourly", "overhead", "cache_hit", "cached_weight", "kwh", "input_per_output", "price_cached")


def read_sheet(path: Path, sheet: Sheet) -> Sheet:
    """The sheet with what the file says.

    Raises:
        ConfigError: not readable, or an entry that is unknown or impossible.
    """
    try:
        data = tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"price sheet {path}: {error}") from None
    return change(sheet, data)


def read_settings(settings: Sequence[str], sheet: Sheet) -> Sheet:
    """The sheet with NAME=VALUE or NAME=LOW,MIDDLE,HIGH.

    Raises:
        ConfigError: as `read_sheet`.
    """
    for setting in settings:
        name, _, text = setting.partition("=")
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            raise ConfigError(f"--set {setting}: write NAME=VALUE or NAME=LOW,MIDDLE,HIGH") from None
        sheet = change(sheet, {name: numbers[0] if len(numbers) == 1 else numbers})
    return sheet


def change(sheet: Sheet, data: Mapping[str, Any]) -> Sheet:
    """The sheet with other entries.

    Raises:
        ConfigError: names the entry.
    """
    known = {entry.name for entry in fields(Sheet)}
    for name, value in data.items():
        if name not in known:
            raise ConfigError(f"price sheet: {name} is unknown; known are {', '.join(sorted(known))}")
        sheet = replace(sheet, **{name: _range(name, value)})
    return sheet


def assumptions(sheet: Sheet) -> list[list[str]]:
    """Rows for people: name, low, middle, high, meaning. What does not matter for this sheet is left out."""
    rows = []
    unused = set() if not sheet.hourly.mid else {"life_years"}
    for name, meaning in MEANING.items():
        span: Range = getattr(sheet, name)
        if name not in unused:
            rows.append([name, *(number(value) for value in (span.low, span.mid, span.high)), meaning])
    return rows


def _range(name: str, value: Any) -> Range:
    numbers = value if isinstance(value, list) else [value] * 3
    if len(numbers) != 3 or not all(type(entry) in (int, float) for entry in numbers):
        raise ConfigError(f"price sheet: {name} = {value!r}; give a number or [low, middle, high]")
    low, mid, high = (float(entry) for entry in numbers)
    least = 0.0 if name in _MAY_BE_ZERO else 1e-9
    most = 1.0 if name in _SHARES else 1e9
    if not least <= low <= mid <= high <= most:
        raise ConfigError(f"price sheet: {name} = {value!r} is not in order within {least:g}..{most:g}")
    return Range(low, mid, high)
