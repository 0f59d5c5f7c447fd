"""The prompts of a benchmark, and how a steady decode step is timed.

A step's time is the difference of two runs that differ in their output length alone, so prefill and start-up
cancel out. Knows the engine only by its public methods.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from headrace.core.engine import Engine
from headrace.core.request import Request
from headrace.ipc.messages import Sampling


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """Prompt lengths are drawn evenly from shortest..longest."""

    shortest: int = 128
    longest: int = 512
    few: int = 32  # output tokens of the short run
    many: int = 256  # of the long one


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Of one batch size, in milliseconds."""

    median: float
    smallest: float
    largest: float


def random_prompts(count: int, shape: DecodeShape, vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts of uniformly random tokens; equal arguments give equal prompts."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shape.shortest, shape.longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def run_all(engine: Engine, prompts: Sequence[Sequence[int]], num_output: int) -> list[list[int]]:
    """Greedy output ids of all prompts, submitted at once; no stop ids."""
    sampling = Sampling(max_tokens=num_output, temperature=0.0)
    requests = [Request(f"bench-{i}", prompt, sampling) for i, prompt in enumerate(prompts)]
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
    return [request.output_ids for request in requests]


def time_decode(
    engine: Engine, vocab_size: int, batch: int, shape: DecodeShape, repeats: int, seed: int = 0
) -> StepTimes:
    """Time one decode step of `batch` requests. Every run has prompts of its own, so no prefix is cached."""

    def run(num_output: int, seed: int) -> None:
        run_all(engine, random_prompts(batch, shape, vocab_size, seed), num_output)

    return time_difference(run, shape, repeats, seed)


def time_difference(
    run: Callable[[int, int], None], shape: DecodeShape, repeats: int, seed: int
) -> StepTimes:
    """Step time from pairs of runs; `run` gets an output length and a seed. The first pair warms up."""
    differences = []
    for repeat in range(repeats + 1):
        walls = []
        for part, num_output in enumerate((shape.few, shape.many)):
            begin = time.perf_counter()
            run(num_output, seed + 2 * repeat + part)
            walls.append(time.perf_counter() - begin)
        differences.append((walls[1] - walls[0]) / (shape.many - shape.few) * 1e3)
    return StepTimes(median(differences[1:]), min(differences[1:]), max(differences[1:]))
