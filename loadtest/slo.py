"""Service level objectives: what a request must keep to count as good, and how they are written on a command line.

Knows no request. recorder.py applies them.
"""

import re
from dataclasses import dataclass

from headrace.config import ConfigError

_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_TERM = re.compile(r"(\w+)=(\d+(?:\.\d+)?)(us|ms|s)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Limits of one request, seconds; None = none. Latencies count from the intended send time."""

    ttft: float | None = None  # to the first token
    itl: float | None = None  # of the gaps between its events, 99 % are at most so long
    tpot: float | None = None  # mean time per output token after the first
    e2e: float | None = None  # to the last token

    def __str__(self) -> str:
        found = ((name, getattr(self, name)) for name in ("ttft", "itl", "tpot", "e2e"))
        return ",".join(f"{name}={seconds * 1000:g}ms" for name, seconds in found if seconds is not None)


def parse_slo(text: str) -> Slo:
    """Read "ttft=500ms,itl=50ms".

    Raises:
        ConfigError: names the term that is none.
    """
    limits: dict[str, float] = {}
    for term in text.split(","):
        match = _TERM.fullmatch(term.strip())
        if match is None or match[1] not in ("ttft", "itl", "tpot", "e2e"):
            raise ConfigError(f"--slo {term!r}: write ttft=500ms,itl=50ms (also tpot, e2e; us, ms, s)")
        limits[match[1]] = float(match[2]) * _UNITS[match[3]]
    return Slo(**limits)
