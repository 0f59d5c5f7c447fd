"""`headrace bench tune`: measure the launch choices of a model's kernels on this card, and keep the best in the table.

A candidate counts only if it computes what the present choice computes. `python -P -m headrace.core.bench.tune -h`.
"""

import argparse
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from triton.runtime.errors import TritonError

from headrace.config import ConfigError
from headrace.core.bench.kernel_case import COLD_BYTES, KernelCase, time_case
from headrace.core.bench.tunables import Tunable, tunables
from headrace.core.hf_config import read_spec
from headrace.kernels.tuned import TABLE, read_table

GAIN = 0.01  # share of the time that a change must save: what two runs of one choice differ by
DIFFERENCE = 1e-2  # error's length over the output's: roundings of bfloat16 in another order
CALLS = 4


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(prog="headrace bench tune", description=__doc__)
    parser.add_argument("--model", action="append", type=Path, required=True, help="Hugging Face folder")
    parser.add_argument("--match", default="", help="regular expression that an entry's name must contain")
    parser.add_argument("--table", type=Path, default=TABLE, help="where the choices are written")
    found = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 160)
    if not torch.cuda.is_available():
        console.print("headrace bench tune: no CUDA card is visible")
        return 1
    choices: dict[str, Any] = {}
    try:
        for path in found.model:
            for tunable in tunables(read_spec(path)):
                if re.search(found.match, tunable.entry):
                    choices[tunable.entry] = asdict(choose(tunable, console))
    except ConfigError as error:
        console.print(f"headrace bench tune: {error}")
        return 1
    write(found.table, torch.cuda.get_device_name(), choices)
    return 0


def choose(tunable: Tunable, console: Console) -> Any:
    """The fastest candidate that computes the right thing."""
    best, best_us = tunable.candidates[0], float("inf")
    expected = None
    console.print(tunable.entry)
    for candidate in tunable.candidates:
        try:
            # Equal seeds, equal inputs.
            torch.manual_seed(0)
            out = tunable.calls(candidate, 1)[0]().float()
            expected = out if expected is None else expected
            error = float((out - expected).norm() / expected.norm())
            if not error < DIFFERENCE:
                console.print(f"  {candidate}: differs by {error:.1e}")
                continue
            us = _time(tunable, candidate)
        except (RuntimeError, ValueError, AssertionError, TritonError) as error:
            # A choice that does not fit the card is a finding.
            console.print(f"  {candidate}: {type(error).__name__}")
            continue
        console.print(f"  {us:8.1f} us {tunable.flops / us / 1e6:6.0f} TFLOP/s  {candidate}")
        if us < best_us * (1 - GAIN):
            best, best_us = candidate, us
    return best


def write(path: Path, card: str, choices: dict[str, Any]) -> None:
    """Put a card's choices into the table, one a line; others stay."""
    table = {name: dict(found) for name, found in read_table(path).items()} if path.exists() else {}
    table[card] = {**table.get(card, {}), **choices}
    cards = [f"{json.dumps(name)}: {{\n" + ",\n".join(_lines(table[name])) + "\n}" for name in sorted(table)]
    path.write_text("{" + ",\n".join(cards) + "}\n", encoding="utf-8")


def _lines(choices: dict[str, Any]) -> Sequence[str]:
    return [f"  {json.dumps(name)}: {json.dumps(choices[name])}" for name in sorted(choices)]


def _time(tunable: Tunable, candidate: Any) -> float:
    """Microseconds a call, in a recorded graph."""
    case = KernelCase(tunable.entry, COLD_BYTES / CALLS, tunable.flops, partial(tunable.calls, candidate))
    return time_case(case).median_us


if __name__ == "__main__":
    sys.exit(main())
