"""One measured call of a kernel, and how it is timed: as the serving step runs it, in a recorded graph.

A case makes many calls over different memory, so that nothing is found in the L2 cache. Knows no kernel.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

COLD_BYTES = 200 << 20  # several times the L2 cache of any card
MAX_CALLS = 200
REPLAYS = 7

Call = Callable[[], object]


@dataclass(frozen=True, slots=True)
class KernelCase:
    """What is called, and what it must move and compute at least."""

    name: str
    bytes: float  # read and written once
    flops: float
    calls: Callable[[int], Sequence[Call]]  # that many calls, each over memory of its own

    def num_calls(self) -> int:
        """Enough to leave the cache, few enough to record."""
        return max(1, min(MAX_CALLS, -(-COLD_BYTES // max(int(self.bytes), 1))))


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Microseconds a call: median and smallest of the replays, launch gaps of the graph included."""

    case: KernelCase
    median_us: float
    best_us: float

    def row(self) -> str:
        """One line of the table: microseconds, megabytes, TB/s, TFLOP/s."""
        case, seconds = self.case, self.median_us * 1e-6
        return (
            f"{case.name:46s} {self.median_us:9.2f} {self.best_us:9.2f} {case.bytes / 1e6:9.2f}"
            f" {case.bytes / seconds / 1e12:7.2f} {case.flops / seconds / 1e12:8.1f}"
        )


HEADER = f"{'case':46s} {'us':>9s} {'best us':>9s} {'MB':>9s} {'TB/s':>7s} {'TFLOP/s':>8s}"


def time_case(case: KernelCase) -> KernelTime:
    """Record the calls as one graph and time its replays."""
    calls = case.calls(case.num_calls())
    for call in calls[:2]:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    times.sort()
    return KernelTime(case, times[len(times) // 2], times[0])
