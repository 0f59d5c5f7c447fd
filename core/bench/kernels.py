"""Times kernels at the shapes of real models: `python -P -m headrace.core.bench.kernels --only attention`.

A group's module lists its cases; here they are checked against their references, chosen, timed and printed.
"""

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from triton.runtime.errors import TritonError

from headrace.core.bench import attention_kernels, moe_kernels
from headrace.core.bench.kernel_case import HEADER, KernelCase, time_case
from headrace.core.bench.record import card, commit, versions


@dataclass(frozen=True, slots=True)
class Group:
    """Kernels that are checked and timed together."""

    check: Callable[[], None]  # raises AssertionError where a kernel differs from its reference
    cases: Callable[[], list[KernelCase]]
    sweep: Callable[[], list[KernelCase]]  # the same work under other launch choices


GROUPS: Mapping[str, Group] = {
    "attention": Group(attention_kernels.check, attention_kernels.cases, attention_kernels.sweep),
    "moe": Group(moe_kernels.check, moe_kernels.cases, moe_kernels.sweep),
}


def main() -> int:
    """Check, then time."""
    arguments = _parse()
    device = torch.device("cuda")
    print(f"{card(device)}, commit {commit()}, {versions()}")
    for name in arguments.only:
        group = GROUPS[name]
        group.check()
        print(f"{name}: equal to the references")
        print(HEADER)
        for case in (group.sweep if arguments.sweep else group.cases)():
            if arguments.match is None or re.search(arguments.match, case.name):
                _time(case, compile_only=arguments.compile_only)
    return 0


def _time(case: KernelCase, *, compile_only: bool) -> None:
    try:
        if compile_only:
            case.calls(1)[0]()
            torch.cuda.synchronize()
        else:
            print(time_case(case).row(), flush=True)
    except (RuntimeError, ValueError, AssertionError, TritonError) as error:
        # A launch choice that does not fit the card is a finding, not the end of the table.
        print(f"{case.name:46s} {type(error).__name__}: {str(error).splitlines()[0][:80]}", flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headrace.core.bench.kernels", description=__doc__)
    parser.add_argument("--only", nargs="+", choices=sorted(GROUPS), default=sorted(GROUPS))
    parser.add_argument("--match", help="regular expression that a case's name must contain")
    parser.add_argument(
        "--sweep", action="store_true", help="other launch choices instead of the chosen ones"
    )
    parser.add_argument("--compile-only", action="store_true", help="fill the compiler's cache")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
