"""`headrace bench host-gap`: how long the card waits for the host between two steps of a full batch, and why.

The gap is the period of a steady step less the time of a replay alone; beside it, what each verb of a step costs
the host. `python -P -m headrace.core.bench.host_gap -h`.
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from headrace.config import CacheConfig, Config, ConfigError, EngineConfig, ModelConfig, SchedulerConfig
from headrace.core.bench.workload import DecodeShape, random_prompts
from headrace.core.build import Built, build
from headrace.core.launched import Launched
from headrace.core.request import Request
from headrace.ipc.messages import Sampling

REPLAYS = 20
SETTLING = 10  # steps after the last prefill that are not counted


@dataclass(slots=True)
class Watch:
    """Seconds of each step by verb. Calls within one step add up."""

    now: dict[str, float] = field(default_factory=dict)
    steps: list[dict[str, float]] = field(default_factory=list)

    def time(self, verb: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, counted under `verb`."""

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.now[verb] = self.now.get(verb, 0.0) + time.perf_counter() - begin

        return timed

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
    table = Table(
        "batch", "period us", "replay us", "gap us", "schedule", "prepare", "execute", "commit", "wait"
    )
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
    for index, prompt in enumerate(random_prompts(batch, shape, built.model.spec.vocab_size, seed=batch)):
        built.engine.submit(Request(f"gap-{batch}-{index}", prompt, sampling))
    gc.collect()
    gc.freeze()
    while built.engine.has_work:
        begin = time.perf_counter()
        built.engine.step()
        watch.step(time.perf_counter() - begin)
    # The last steps of a run shrink as requests end, the first ones hold prompts.
    steady = watch.steps[-steps // 2 - 2 : -4]
    found = {
        verb: median(step.get(verb, 0.0) for step in steady) * 1e6
        for verb in ("step", "schedule", "prepare", "execute", "wait")
    }
    rest = [
        step["step"] - sum(step.get(verb, 0.0) for verb in ("schedule", "prepare", "execute", "wait"))
        for step in steady
    ]
    replay = _replay_us(built, batch)
    cells = (found["step"], replay, found["step"] - replay, found["schedule"], found["prepare"])
    return (
        str(batch),
        *(f"{us:.0f}" for us in (*cells, found["execute"], median(rest) * 1e6, found["wait"])),
    )


def _watched(built: Built) -> Watch:
    watch = Watch()
    verbs: tuple[tuple[object, str], ...] = (
        (built.engine.scheduler, "schedule"),
        (built.parts.preparer, "prepare"),
        (built.parts.executor, "execute"),
    )
    for owner, verb in verbs:
        original = getattr(type(owner), verb).__get__(owner)
        setattr(owner, verb, watch.time(verb, original))
    executed = built.parts.executor.execute

    def execute(*args: Any, **kwargs: Any) -> Launched:
        launched = executed(*args, **kwargs)
        for name in ("read",):
            setattr(launched, name, watch.time("wait", launched.read))
        return launched

    for name in ("execute",):
        setattr(built.parts.executor, name, execute)
    return watch


def _replay_us(built: Built, batch: int) -> float:
    """Microseconds of a recorded step, one behind the other with nothing in between."""
    assert built.parts.graphs is not None, "a card has graphs"
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    built.parts.graphs.replay(batch)
    begin.record()
    for _ in range(REPLAYS):
        built.parts.graphs.replay(batch)
    end.record()
    end.synchronize()
    milliseconds: float = begin.elapsed_time(end)
    return milliseconds / REPLAYS * 1e3


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headrace bench host-gap", description=__doc__)
    parser.add_argument("--model", default="", help="Hugging Face folder; the embedded model if left out")
    parser.add_argument("--load-format", default="safetensors", choices=("safetensors", "dummy"))
    parser.add_argument("--batches", type=_numbers, default=[1, 64, 256], help="comma-separated")
    parser.add_argument("--steps", type=int, default=100, help="decode steps of each")
    parser.add_argument("--kv-memory", type=int, default=0, help="bytes; 0 = what the card has left")
    parser.add_argument("--max-num-batched-tokens", type=int, default=8192, help="query tokens of a step")
    parser.add_argument("--deterministic", action="store_true", help="batch-invariant kernels")
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
        engine=EngineConfig(deterministic=arguments.deterministic),
    )


if __name__ == "__main__":
    sys.exit(main())
