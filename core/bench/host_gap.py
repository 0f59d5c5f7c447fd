"""`headrace bench host-gap`: how long the card waits between two replays of a full batch, and what the host does.

The gap is from the end of a replay to the start of the next one, by the card's clock: the host's delay and the
copies in between. Beside it, what each verb of a step costs the host. `python -P -m headrace.core.bench.host_gap -h`.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from headrace.config import (
    CacheConfig,
    Config,
    ConfigError,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from headrace.core.bench.workload import DecodeShape, draw_prompts
from headrace.core.build import Built, build
from headrace.core.launched import Launched
from headrace.core.request import Request
from headrace.ipc.messages import Sampling

VERBS = ("schedule", "prepare", "execute", "commit")
SETTLING = 10  # steps after the last prefill that are not counted


@dataclass(slots=True)
class Watch:
    """Seconds of each step by verb. Calls within one step add up."""

    now: dict[str, float] = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)
    replays: list[tuple[torch.cuda.Event, torch.cuda.Event]] = field(default_factory=list)  # begin and end

    def time(self, verb: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, counted under `verb`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.now[verb] = self.now.get(verb, 0.0) + time.perf_counter() - begin

        return timed

    def mark(self, replay: Callable[..., Any]) -> Callable[..., Any]:
        """`replay`, between two events."""

        def marked(rows: int) -> Any:
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            outputs = replay(rows)
            end.record()
            self.replays.append((begin, end))
            return outputs

        return marked

    def step(self, seconds: float) -> None:
        """A step of so many seconds is over."""
        self.steps.append({**self.now, "step": seconds})
        self.now = {}


def main() -> int:
    """Measure and print a table."""
    arguments = _parse()
    console = Console()
    if not torch.cuda.is_available():
        console.print("headrace bench host-gap: there is a gap between host and card only where a card is")
        return 1
    try:
        built = build(_config(arguments).resolve())
    except ConfigError as error:
        console.print(f"headrace bench host-gap: {error}")
        return 1
    table = Table("batch", "period us", "replay us", "gap us", "most", *VERBS, "host us", "wait us")
    for batch in arguments.batches:
        table.add_row(*measure(built, batch, arguments.steps))
    console.print(table)
    console.print(
        "medians over steady steps; schedule to commit: microseconds of the host; wait: for the card"
    )
    return 0


def measure(built: Built, batch: int, steps: int) -> tuple[str, ...]:
    """Cells of one batch size."""
    watch = _watched(built)
    shape = DecodeShape(128, 512, 0, 0)
    sampling = Sampling(max_tokens=steps + SETTLING, temperature=0.0)
    for index, prompt in enumerate(draw_prompts(batch, shape, built.model.spec.vocab_size, seed=batch)):
        built.engine.submit(Request(f"gap-{batch}-{index}", prompt, sampling))
    gc.collect()
    gc.freeze()
    while built.engine.has_work:
        begin = time.perf_counter()
        built.engine.step()
        watch.step(time.perf_counter() - begin)
    # The first steps hold prompts, the last ones fewer requests.
    steady = watch.steps[-steps // 2 - 2 : -4]
    for step in steady:
        step["commit"] = step["step"] - sum(step.get(verb, 0.0) for verb in (*VERBS, "wait"))
        step["host"] = step["step"] - step["wait"]
    medians = [median(step[verb] for step in steady) * 1e6 for verb in ("step", *VERBS, "host", "wait")]
    torch.cuda.synchronize()
    replays = watch.replays[-steps // 2 - 2 : -4]
    busy = median(begin.elapsed_time(end) for begin, end in replays) * 1e3
    gaps = [end.elapsed_time(begin) * 1e3 for (_, end), (begin, _) in pairwise(replays)]
    cells = (medians[0], busy, median(gaps), max(gaps), *medians[1:])
    return (str(batch), *(f"{us:.0f}" for us in cells))


def _watched(built: Built) -> Watch:
    """A fresh watch over the engine's parts."""
    watch, parts = Watch(), built.parts
    assert parts.graphs is not None, "a card has graphs"
    executed = _original(parts.executor, "execute")

    def execute(*args: Any, **kwargs: Any) -> Launched:
        launched: Launched = executed(*args, **kwargs)
        _replace(launched, "read", watch.time("wait", launched.read))
        return launched

    scheduler = built.engine.scheduler
    _replace(scheduler, "schedule", watch.time("schedule", _original(scheduler, "schedule")))
    _replace(parts.preparer, "prepare", watch.time("prepare", _original(parts.preparer, "prepare")))
    _replace(parts.executor, "execute", watch.time("execute", execute))
    _replace(parts.graphs, "replay", watch.mark(_original(parts.graphs, "replay")))
    return watch


def _original(owner: object, name: str) -> Callable[..., Any]:
    """The method as its class has it, whatever an earlier watch put in its place."""
    method: Callable[..., Any] = getattr(type(owner), name).__get__(owner)
    return method


def _replace(owner: object, name: str, value: Callable[..., Any]) -> None:
    setattr(owner, name, value)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headrace bench host-gap", description=__doc__)
    parser.add_argument("--model", default="", help="Hugging Face folder; the embedded model if left out")
    parser.add_argument("--load-format", default="safetensors", choices=("safetensors", "dummy"))
    parser.add_argument("--batches", type=_numbers, default=[1, 64, 256], help="comma-separated")
    parser.add_argument("--steps", type=int, default=100, help="decode steps of each")
    parser.add_argument("--kv-memory", type=int, default=0, help="bytes; 0 = what the card has left")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192, help="query tokens of a step")
    parser.add_argument("--deterministic", action="store_true", help="batch-invariant kernels")
    parser.add_argument("--compile", action="store_true", help="layers by torch.compile")
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _config(arguments: argparse.Namespace) -> Config:
    most = max(arguments.batches)
    return Config(
        model=ModelConfig(path=arguments.model, load_format=arguments.load_format),
        cache=CacheConfig(memory_bytes=arguments.kv_memory, prefix_cache=False),
        scheduler=SchedulerConfig(
            max_num_seqs=most,
            max_num_batched_tokens=max(arguments.max_num_batched_tokens, most),
            max_waiting=max(SchedulerConfig().max_waiting, most),
        ),
        engine=EngineConfig(deterministic=arguments.deterministic, compile=arguments.compile),
        # The gap of plain steps: a step with drafts waits for the one before it on purpose.
        speculation=SpeculationConfig(drafters="off"),
    )


if __name__ == "__main__":
    sys.exit(main())
