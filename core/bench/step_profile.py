"""A step by kernel: how often each runs, how long, and how fast it moves the bytes that it must.

Reads torch's profiler over the real step, graph replays included. Knows kernels by their names only.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

SHOWN = 16  # kernels of the table; the rest is one line
NAME = 56  # characters of a kernel's name
# What a kernel does, by the first pattern that its name holds.
KINDS = (
    ("experts", r"gate_up|down_kernel|experts|fp8_tiles.*order"),
    ("attention", r"gqa_|mla_(decode|prefill)|merge_kernel|gather_kernel"),
    ("dense products", r"nvjet|gemm|cublas|cutlass|linear_one|splitK|fp8_tiles"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelShare:
    """One kernel within a step."""

    name: str
    calls: float  # a step
    us: float  # a step
    share: float  # of the time in which the device computed


@dataclass(frozen=True, slots=True, kw_only=True)
class StepProfile:
    """One step, averaged over those that were profiled."""

    span_us: float  # from the first kernel's begin to the last one's end
    busy_us: float  # the rest of the span the device waited
    kernels: tuple[KernelShare, ...]  # the longest first

    @property
    def idle(self) -> float:
        """Share of the span."""
        return 1 - self.busy_us / max(self.span_us, 1e-9)


def profile_steps(run: Callable[[], int]) -> StepProfile:
    """Profile `run`, which makes some steps and says how many."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        steps = run()
        torch.cuda.synchronize()
    spans: dict[str, list[tuple[float, float]]] = {}
    for event in profiler.events() or ():
        if event.device_type.name == "CUDA":
            spans.setdefault(event.name, []).append((event.time_range.start, event.time_range.end))
    times = sorted(span for found in spans.values() for span in found)
    busy = _covered(times)
    kernels = [
        KernelShare(
            name=name,
            calls=len(found) / steps,
            us=sum(end - start for start, end in found) / steps,
            share=sum(end - start for start, end in found) / max(busy, 1e-9),
        )
        for name, found in spans.items()
    ]
    kernels.sort(key=lambda kernel: -kernel.us)
    span = max(end for _, end in times) - times[0][0] if times else 0.0
    return StepProfile(span_us=span / steps, busy_us=busy / steps, kernels=tuple(kernels))


def profile_table(found: StepProfile, bytes_of: Mapping[str, float]) -> Table:
    """Kernels and kinds of kernels.

    Args:
        found: a step.
        bytes_of: bytes that a step must read, by kind.
    """
    title = f"{found.span_us:.0f} us a step, of which the device waits {found.idle:.1%}"
    table = Table("kernel", "calls", "us", "share", "MB", "TB/s", title=title)
    kinds: dict[str, float] = {}
    for kernel in found.kernels:
        kind = kind_of(kernel.name)
        kinds[kind] = kinds.get(kind, 0.0) + kernel.us
    for kernel in found.kernels[:SHOWN]:
        table.add_row(kernel.name[:NAME], f"{kernel.calls:.0f}", f"{kernel.us:.0f}", f"{kernel.share:.1%}")
    rest = found.kernels[SHOWN:]
    if rest:
        us, share = sum(kernel.us for kernel in rest), sum(kernel.share for kernel in rest)
        table.add_row(f"{len(rest)} others", "", f"{us:.0f}", f"{share:.1%}")
    table.add_section()
    for kind, us in sorted(kinds.items(), key=lambda item: -item[1]):
        size = bytes_of.get(kind)
        moved = ("", "") if size is None else (f"{size / 1e6:.0f}", f"{size / us / 1e6:.2f}")
        table.add_row(f"all {kind}", "", f"{us:.0f}", f"{us / max(found.busy_us, 1e-9):.1%}", *moved)
    return table


def kind_of(kernel: str) -> str:
    """What a kernel of this name does."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, kernel)), "others")


def _covered(spans: list[tuple[float, float]]) -> float:
    """Length of the union of sorted spans: dependent launches overlap the kernel before them."""
    total, reached = 0.0, float("-inf")
    for start, end in spans:
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
