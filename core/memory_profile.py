"""How much of a card's memory the KV pool may have: what is left beside the largest step, measured by running it.

Knows an engine by its public methods alone. Called by core/build.py before the real pool is made.
"""

import gc
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.config import ConfigError
from headrace.core.engine import Engine
from headrace.core.request import Request
from headrace.ipc.messages import Sampling

log = logging.getLogger(__name__)

GRAPH_BYTES = 4 << 20  # what the driver keeps for a recorded step, beside the memory that all of them share

# Every buffer that a request can cause: penalties, bias, barred stops, log-probabilities.
DEMANDING = Sampling(
    max_tokens=1,
    temperature=0.7,
    top_k=40,
    top_p=0.9,
    repetition_penalty=1.1,
    logit_bias=((0, 1.0),),
    min_tokens=1,
    stop_token_ids=(0,),
    logprobs=20,
)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes of a card."""

    total: int
    weights: int
    graphs: int  # recorded steps, and what an engine keeps by slot
    step: int  # what the largest step takes for a while
    other: int  # the driver, loaded kernels, other processes

    def left(self, utilization: float) -> int:
        """Bytes of the KV pool.

        Args:
            utilization: share of `total` that may be in use.

        Raises:
            ConfigError: nothing is left; the message says what took it.
        """
        left = int(self.total * utilization) - self.weights - self.graphs - self.step - self.other
        if left <= 0:
            raise ConfigError(
                f"cache.gpu_memory_utilization = {utilization} of {_gib(self.total)} leaves no memory for the KV "
                f"cache: {self}; lower scheduler.max_num_batched_tokens or scheduler.max_num_seqs, or raise it"
            )
        return left

    def __str__(self) -> str:
        parts = (("weights", self.weights), ("largest step", self.step), ("graphs", self.graphs))
        return ", ".join(f"{name} {_gib(size)}" for name, size in (*parts, ("other", self.other)))


def profile(
    make: Callable[[], Engine],
    *,
    pool_bytes: int,
    num_rows: int,
    num_tokens: int,
    longest: int,
    num_graphs: int,
) -> MemoryUse:
    """Run the largest steps of a small engine, and throw it away.

    Args:
        make: builds it, with a pool that holds its largest step, and of the graphs the largest alone.
        pool_bytes: of that pool.
        num_rows: requests of the largest batch.
        num_tokens: query tokens of the largest step.
        longest: tokens of the longest prompt.
        num_graphs: of the real engine.
    """
    _clean()
    weights = torch.cuda.memory_allocated()
    reserved = torch.cuda.memory_reserved()
    engine = make()
    _clean()
    kept = torch.cuda.memory_reserved()
    torch.cuda.reset_peak_memory_stats()
    run_largest(engine, num_rows, num_tokens, longest)
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    use = MemoryUse(
        total=total,
        weights=weights,
        graphs=max(0, kept - reserved - pool_bytes) + num_graphs * GRAPH_BYTES,
        step=torch.cuda.max_memory_reserved() - kept,
        other=total - free - torch.cuda.memory_reserved(),
    )
    del engine
    _clean()
    return use


def run_largest(engine: Engine, num_rows: int, num_tokens: int, longest: int) -> None:
    """One step of the longest prompt, and one in which every slot has its share and asks for everything."""
    for rows, length, sampling in (
        (1, min(num_tokens, longest), Sampling(max_tokens=1)),
        (num_rows, min(max(1, num_tokens // num_rows), longest), DEMANDING),
    ):
        for row in range(rows):
            # Prompts of their own: a shared prefix would not be computed twice.
            prompt = [row % 2, *[row // 2 % 97] * (length - 1)]
            engine.submit(
                Request(f"profile-{rows}-{row}", prompt, sampling, cache_salt=f"profile {rows} {row}")
            )
        while engine.has_work:
            engine.step()


def _clean() -> None:
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.2f} GiB"
