"""What a gateway benchmark measures, in which order: settings of load, and the front ends compared under each.

Plain data; bench_gateway.py runs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

HEADRACE, FASTAPI, AIOHTTP = "headrace", "fastapi", "aiohttp"
FRONTS = (HEADRACE, FASTAPI, AIOHTTP)
BENCHES = ("saturate", "paced", "new", "idle")
TRANSPORTS = ("sse", "ws")
STREAMS = {"saturate": (64, 512, 2000), "paced": (512,), "new": (64,), "idle": (10_000,)}
PACED_TOKENS_PER_S = 20_000
IDLE_STEP_MS = 5000.0


@dataclass(frozen=True, slots=True)
class Kind:
    """A front end to start; several workers share its port."""

    name: str
    workers: int = 1

    @property
    def label(self) -> str:
        return self.name if self.workers == 1 else f"{self.name}-{self.workers}"


@dataclass(frozen=True, slots=True)
class Case:
    """One way to a front end."""

    kind: Kind
    transport: str


@dataclass(frozen=True, slots=True)
class Setting:
    """One load, under which its cases take turns, round by round."""

    bench: str
    streams: int
    cases: tuple[Case, ...]
    rounds: int
    seconds: float  # of one measurement

    @property
    def step_ms(self) -> float:
        """How long the engine's steps take."""
        if self.bench == "paced":
            return self.streams / PACED_TOKENS_PER_S * 1e3
        return IDLE_STEP_MS if self.bench == "idle" else 0.0

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The front ends that must run."""
        return tuple(dict.fromkeys(case.kind for case in self.cases))


def cases(fronts: Sequence[str], transports: Sequence[str], workers: int = 1) -> tuple[Case, ...]:
    """All that go together: only ours speaks WebSocket, and only ours has several workers, beside one alone."""
    found = [
        Case(Kind(front), transport)
        for front in fronts
        for transport in transports
        if front == HEADRACE or transport == "sse"
    ]
    if workers > 1:
        found += [Case(Kind(HEADRACE, workers), transport) for transport in transports]
    return tuple(found)


def table(rounds: int, seconds: float) -> tuple[Setting, ...]:
    """Everything that docs/performance.md reports."""
    usual = cases((HEADRACE, FASTAPI), TRANSPORTS)
    pair = (Case(Kind(HEADRACE, 2), "sse"),)
    floor = (Case(Kind(AIOHTTP), "sse"),)
    return (
        Setting("saturate", 64, usual + floor, rounds, seconds),
        Setting("saturate", 512, usual + pair, rounds, seconds),
        Setting("saturate", 2000, usual, rounds, seconds),
        Setting("paced", 512, usual + pair, rounds, seconds),
        Setting("new", 64, usual + floor, rounds, seconds),
        # One after the other in a fresh process: what the first leaves free would hide what the second takes.
        *(Setting("idle", 10_000, (case,), 1, 0.0) for case in cases((HEADRACE,), TRANSPORTS)),
    )


def quick() -> tuple[Setting, ...]:
    """The ratio to the usual pattern in half a minute, for CI."""
    return (Setting("saturate", 64, cases((HEADRACE, FASTAPI), ("sse",)), 3, 1.0),)
