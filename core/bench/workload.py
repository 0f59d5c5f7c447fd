"""The prompts of a benchmark, and how decode steps, prefills and traces are timed.

A step's time is the difference of two runs that differ in their output length alone, so prefill and start-up
cancel out. Every shape runs once before it is timed. Knows the engine only by its public methods.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch

from headrace.config import ConfigError
from headrace.core.engine import Engine
from headrace.core.request import Request
from headrace.ipc.messages import Sampling


@dataclass(frozen=True, slots=True)
class DecodeShape:
    """Random prompts, their lengths drawn evenly from shortest..longest, or given ones, taken in turn."""

    shortest: int = 128
    longest: int = 512
    few: int = 32  # output tokens of the short run
    many: int = 256  # of the long one
    given: tuple[tuple[int, ...], ...] = ()

    @property
    def mean_prompt(self) -> float:
        """Tokens."""
        if self.given:
            return sum(map(len, self.given)) / len(self.given)
        return (self.shortest + self.longest) / 2


@dataclass(frozen=True, slots=True)
class PrefillShape:
    """Prompts of one length, submitted at once, with one output token each."""

    prompts: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests that arrive at once, by their lengths in tokens."""

    prompts: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Of one workload, in milliseconds: a decode step, or the whole run of a prefill or a trace."""

    median: float
    smallest: float
    largest: float


def draw_prompts(count: int, shape: DecodeShape, vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts of uniformly random tokens, or of those given; equal arguments give equal prompts."""
    if shape.given:
        # Two runs that are compared have neighbouring seeds: an even one and the odd one behind it.
        first = seed // 2 * count
        return [list(shape.given[(first + index) % len(shape.given)]) for index in range(count)]
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shape.shortest, shape.longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def read_tokens(path: Path) -> list[list[int]]:
    """Read a JSON list of texts, each a list of token ids; texts of fewer than two tokens are left out.

    Raises:
        ConfigError: it cannot be read, is something else, or has no text.
    """
    try:
        texts = [[int(token) for token in text] for text in json.loads(path.read_text()) if len(text) > 1]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"--tokens: {path} is no JSON list of lists of token ids: {error}") from error
    if not texts:
        raise ConfigError(f"--tokens: {path} has no text of at least two tokens")
    return texts


def read_trace(path: Path) -> Trace:
    """Read a JSON list of [prompt tokens, output tokens].

    Raises:
        ConfigError: it cannot be read or is something else.
    """
    try:
        prompts, outputs = zip(*json.loads(path.read_text()), strict=True)
        return Trace(tuple(int(count) for count in prompts), tuple(int(count) for count in outputs))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"trace {path}: no JSON list of [prompt tokens, output tokens] ({error})") from None


def make_requests(
    lengths: Sequence[int], outputs: Sequence[int], vocab_size: int, seed: int
) -> list[Request]:
    """Greedy requests of random tokens with those lengths; no stop ids."""
    generator = torch.Generator().manual_seed(seed)
    return [
        _request(index, torch.randint(0, vocab_size, (length,), generator=generator).tolist(), output)
        for index, (length, output) in enumerate(zip(lengths, outputs, strict=True))
    ]


def run_requests(engine: Engine, requests: Sequence[Request]) -> float:
    """Submit all at once and step until they are done. Returns seconds; what came out, they hold."""
    begin = time.perf_counter()
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
    return time.perf_counter() - begin


def run_all(engine: Engine, prompts: Sequence[Sequence[int]], num_output: int) -> list[list[int]]:
    """Greedy output ids of all prompts, submitted at once; no stop ids."""
    requests = [_request(index, prompt, num_output) for index, prompt in enumerate(prompts)]
    run_requests(engine, requests)
    return [request.output_ids for request in requests]


def time_decode(
    engine: Engine, vocab_size: int, batch: int, shape: DecodeShape, repeats: int, seed: int = 0
) -> StepTimes:
    """Time one decode step of `batch` requests. Every run has prompts of its own, so no prefix is cached."""

    def run(num_output: int, seed: int) -> None:
        run_all(engine, draw_prompts(batch, shape, vocab_size, seed), num_output)

    return time_difference(run, shape, repeats, seed)


def time_difference(
    run: Callable[[int, int], None], shape: DecodeShape, repeats: int, seed: int
) -> StepTimes:
    """Step time from pairs of runs; `run` gets an output length and a seed. A short run warms up."""
    differences = []
    run(shape.few, seed)
    for repeat in range(1, repeats + 1):
        walls = []
        for part, num_output in enumerate((shape.few, shape.many)):
            begin = time.perf_counter()
            run(num_output, seed + 2 * repeat + part)
            walls.append(time.perf_counter() - begin)
        differences.append((walls[1] - walls[0]) / (shape.many - shape.few) * 1e3)
    return _times(differences)


def time_prefill(
    engine: Engine, vocab_size: int, shape: PrefillShape, repeats: int, seed: int = 0
) -> StepTimes:
    """Time all prompts of a shape, from their submission to the last one's token."""
    walls = []
    for repeat in range(repeats + 1):
        lengths = [shape.tokens] * shape.prompts
        requests = make_requests(lengths, [1] * shape.prompts, vocab_size, seed + repeat)
        walls.append(run_requests(engine, requests) * 1e3)
    return _times(walls[1:])


def time_trace(engine: Engine, vocab_size: int, trace: Trace, repeats: int, seed: int = 0) -> StepTimes:
    """Time the whole trace. A sixteenth of it, with short outputs, warms up."""
    some = slice(0, None, 16)
    run_requests(engine, make_requests(trace.prompts[some], [8] * len(trace.prompts[some]), vocab_size, seed))
    walls = []
    for repeat in range(1, repeats + 1):
        requests = make_requests(trace.prompts, trace.outputs, vocab_size, seed + repeat)
        walls.append(run_requests(engine, requests) * 1e3)
    return _times(walls)


def enter_decode(engine: Engine, vocab_size: int, batch: int, shape: DecodeShape) -> list[Request]:
    """Bring `batch` requests to where each step decodes all of them; they go on to `shape.many` outputs."""
    prompts = draw_prompts(batch, shape, vocab_size, seed=77)
    requests = [_request(index, prompt, shape.many) for index, prompt in enumerate(prompts)]
    for request in requests:
        engine.submit(request)
    while any(request.num_output < shape.few // 2 for request in requests):
        engine.step()
    return requests


def leave_decode(engine: Engine, requests: Sequence[Request]) -> None:
    """End them, and the steps that still hold them."""
    for request in requests:
        engine.cancel(request.request_id)
    while engine.has_work:
        engine.step()


def _request(index: int, prompt: Sequence[int], num_output: int) -> Request:
    return Request(f"bench-{index}", prompt, Sampling(max_tokens=num_output, temperature=0.0))


def _times(milliseconds: Sequence[float]) -> StepTimes:
    return StepTimes(median(milliseconds), min(milliseconds), max(milliseconds))
