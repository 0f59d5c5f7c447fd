"""`headrace economics`: what a token costs, from a record and a price sheet; published figures beside it.

Started by module name from the `headrace` command. `python -P -m headrace.loadtest.economics_cli -h`.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console, JustifyMethod
from rich.table import Table

from headrace.config import ConfigError
from headrace.loadtest.economics import Answer, Sheet, Source, answer
from headrace.loadtest.economics_claims import DEEPSEEK_DAY_6
from headrace.loadtest.economics_page import economics_page
from headrace.loadtest.economics_sheet import assumptions, change, read_settings, read_sheet
from headrace.loadtest.economics_source import read_source
from headrace.loadtest.economics_tables import (
    IMPLIED_HEAD,
    RANGE_HEAD,
    SENSITIVITY_HEAD,
    Rows,
    claim_rows,
    day_rows,
    distance,
    implied_rows,
    result_rows,
    sensitivity_rows,
)
from headrace.loadtest.show import number

EXIT_CONFIG = 2
_UNITS = {"": 1.0, "M": 1e6, "B": 1e9, "T": 1e12}


def main(argv: Sequence[str]) -> int:
    """Print, and write what was asked for; 2 = a file or a value cannot be used."""
    arguments = _parse(argv)
    try:
        return _run(arguments, Console(highlight=False))
    except ConfigError as error:
        sys.stderr.write(f"headrace: {error}\n")
        return EXIT_CONFIG


def _run(arguments: argparse.Namespace, console: Console) -> int:
    sheet = Sheet()
    source: Source | None = None
    found: Answer | None = None
    if arguments.record is not None:
        source, mix = read_source(arguments.record, arguments.gpus)
        sheet = change(sheet, mix)
    if arguments.sheet is not None:
        sheet = read_sheet(arguments.sheet, sheet)
    sheet = read_settings(arguments.set, sheet)
    if source is not None:
        found = answer(source, sheet)
        speed = source.speed(sheet.middle())
        console.print(
            f"{source.name}: {number(speed.prefill)} input or {number(speed.decode)} output tokens/s of a busy GPU"
        )
        _print(console, "Assumptions", ("", "low", "middle", "high", "meaning"), assumptions(sheet))
        _print(console, "Results", RANGE_HEAD, result_rows(found, arguments.target))
        _print(console, "Sensitivity, per GPU", SENSITIVITY_HEAD, sensitivity_rows(source, sheet))
    _print(console, f"{DEEPSEEK_DAY_6.name}, recomputed", ("", "published", "recomputed"), day_rows())
    _print(
        console, "155T tokens a day, $22M, 80 %, 81 days: what it says", ("", "figure", "how"), claim_rows()
    )
    _print(console, "and what it needs", IMPLIED_HEAD, implied_rows(sheet))
    if found is not None:
        console.print(distance(found, sheet))
    if arguments.html:
        arguments.html.parent.mkdir(parents=True, exist_ok=True)
        arguments.html.write_text(economics_page(source, sheet, found, arguments.target))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(_as_data(source, sheet, found)) + "\n")
    return 0


def _as_data(source: Source | None, sheet: Sheet, found: Answer | None) -> dict[str, object]:
    """JSON has no infinity: a payback that never comes is null there."""
    data: dict[str, object] = {"schema": 1, "assumptions": asdict(sheet)}
    if source is not None and found is not None:
        data["source"] = asdict(source)
        data["middle"] = asdict(found.middle)
        data["lowest"] = _finite(found.lowest)
        data["highest"] = _finite(found.highest)
    return data


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    return {name: value if abs(value) != float("inf") else None for name, value in values.items()}


def _print(console: Console, title: str, head: tuple[str, ...], rows: Rows) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim", box=None)
    words = {len(head) - 1} if head[-1] in ("meaning", "how", "recomputed") else set()
    for index, name in enumerate(head):
        side: JustifyMethod = "left" if index == 0 or index in words else "right"
        table.add_column(name, justify=side, no_wrap=not index)
    for row in rows:
        table.add_row(*row)
    console.print(table)
    console.print()


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headrace economics", description="What a token costs.")
    parser.add_argument(
        "record",
        type=Path,
        nargs="?",
        help="of a load test (JSON) or an engine benchmark (JSONL); none = published figures",
    )
    parser.add_argument(
        "--gpus", type=int, default=0, help="behind the record's figures; default: what it says, else 1"
    )
    parser.add_argument(
        "--sheet", type=Path, help="price sheet, TOML: NAME = VALUE or NAME = [LOW, MIDDLE, HIGH]"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="over the sheet; repeatable"
    )
    parser.add_argument(
        "--target", type=_tokens, default=155e12, help="tokens a day to find the GPUs for (155T)"
    )
    parser.add_argument("--html", type=Path, help="write the page")
    parser.add_argument("--json", type=Path, help="write results and assumptions")
    return parser.parse_args(argv)


def _tokens(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([MBT]?)", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text}: write a number such as 155T")
    return float(match[1]) * _UNITS[match[2]]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
