"""When users come: open loop (a Poisson or burstier process, or a trace's own times) or closed loop (N users).

Pure functions of a seed. Knows no server; driver.py waits for the times.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from random import Random


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`users` sessions at any time: the next begins when one has ended. They start spread over `ramp_s`."""

    users: int
    ramp_s: float = 0.0


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Sessions at given times, however many are still open; rate 0 = the trace's own times, divided by `speed`.

    The gaps are gamma-distributed with this shape: 1 = Poisson, below 1 = in bursts, above = more evenly.
    """

    rate: float  # sessions per second
    shape: float = 1.0
    speed: float = 1.0
    seed: int = 0


Load = ClosedLoop | OpenLoop


def describe(load: Load) -> str:
    """For people: "8 users" are a closed loop, "12/s Poisson" is an open one."""
    if isinstance(load, ClosedLoop):
        return f"{load.users} user{'s' * (load.users != 1)}"
    if not load.rate:
        return "the trace's own times" + (f", {load.speed:g} times as fast" if load.speed != 1 else "")
    return f"{load.rate:.4g}/s " + ("Poisson" if load.shape == 1 else f"gamma {load.shape:g}")


def times(load: OpenLoop, trace: Iterable[float | None] = ()) -> Iterator[float]:
    """Seconds from the start, in order; without end if there is a rate."""
    if not load.rate:
        yield from (at / load.speed for at in trace if at is not None)
        return
    rng = Random(f"{load.seed} arrivals")  # noqa: S311 - not for secrets
    now = 0.0
    while True:
        now += rng.gammavariate(load.shape, 1 / (load.shape * load.rate))
        yield now
