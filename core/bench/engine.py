"""`headrace bench engine`: decode, prefill and a mixed trace on one engine after the other, beside ceiling and peer.

Runs the correctness check first and reports nothing without it. `python -P -m headrace.core.bench.engine -h`.
"""

import gc
import sys

import torch
from rich.console import Console
from rich.table import Table

from headrace.config import Config, ConfigError
from headrace.core.bench.arguments import PROGRAM, BenchPlan, parse
from headrace.core.bench.check import WrongAnswer, check_decode
from headrace.core.bench.measure import Measurement
from headrace.core.bench.record import EngineRecord, append
from headrace.core.bench.step_profile import profile_table
from headrace.core.bench.synthetic import Coins, SyntheticDrafter, tossing
from headrace.core.bench.workload import Trace, read_trace
from headrace.core.bench.yardstick import Yardstick
from headrace.core.build import build

# Nats by which rounding alone may reorder two tokens: bfloat16 carries 8 bits, fp8 activations 4.
TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1, "fp8": 5e-1}
COLUMNS = (
    "bench",
    "requests",
    "ms",
    "spread",
    "tokens/s",
    "ceiling ms",
    "of ceiling",
    "peer tokens/s",
    "ratio",
)


def main() -> int:
    """Measure, print a table for each engine, append records."""
    # Where nobody looks at a terminal, wide enough for the table.
    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        plan = parse(sys.argv[1:], __doc__)
        trace = None if plan.trace is None else read_trace(plan.trace)
    except ConfigError as error:
        console.print(f"{PROGRAM}: {error}")
        return 1
    failures = 0
    for config in plan.configs:
        try:
            _measure(plan, config, trace, console)
        except (ConfigError, WrongAnswer, torch.OutOfMemoryError) as error:
            # The engines after it are measured all the same.
            console.print(f"{PROGRAM}: {config.model.served_name}: {error}")
            failures += 1
        # The next engine needs this one's memory, which cycles keep until they are looked for.
        gc.collect()
        torch.cuda.empty_cache()
    return 1 if failures else 0


def _measure(plan: BenchPlan, config: Config, trace: Trace | None, console: Console) -> None:
    if plan.acceptance is None:
        _measure_engine(plan, config, trace, console)
        return
    with tossing() as coins:
        _measure_engine(plan, config, trace, console, coins)


def _measure_engine(
    plan: BenchPlan, config: Config, trace: Trace | None, console: Console, coins: Coins | None = None
) -> None:
    built = build(config)
    model = built.model
    if plan.profile and model.device.type != "cuda":
        raise ConfigError("--profile reads the kernels of a card, and this engine runs on the CPU")
    kind = config.model.quantization or str(model.dtype).removeprefix("torch.")
    check_decode(built.engine, model.spec.vocab_size, TOLERANCE[kind])
    if coins is not None and plan.acceptance is not None:
        assert built.engine.speculator is not None
        built.engine.speculator.use_drafters([SyntheticDrafter(plan.acceptance, model.spec.vocab_size)])
        coins.fix(plan.acceptance)
    yardstick = Yardstick(model, fp8=bool(config.model.quantization))
    table = Table(*COLUMNS)
    record = None
    try:
        for measured in Measurement(plan, config, built, yardstick).run(trace):
            record = measured.record
            append(plan.record, record)
            table.add_row(*_cells(record))
            if record.profile is not None:
                console.print(f"{record.bench}, {_requests(record)}")
                console.print(profile_table(record.profile, measured.bytes_of))
    finally:
        if record is not None:
            console.print(f"{record.model}, {record.dtype}, {record.card}, commit {record.commit}")
        rate = "" if yardstick.rate is None else f", products {yardstick.rate / 1e12:.0f} TFLOP/s"
        console.print(f"copy bandwidth {yardstick.bandwidth / 1e9:.1f} GB/s{rate}; decode = prefill checked")
        console.print(table)


def _requests(record: EngineRecord) -> str:
    return f"{record.batch} x {record.prompt_tokens:.0f} in, {record.output_tokens:.0f} out"


def _cells(record: EngineRecord) -> tuple[str, ...]:
    low, high = record.step_ms_spread
    return (
        record.bench,
        _requests(record),
        f"{record.step_ms:.2f}",
        f"{low:.2f} - {high:.2f}",
        f"{record.tokens_per_s:.0f}",
        "" if record.ceiling_ms is None else f"{record.ceiling_ms:.2f}",
        "" if record.of_ceiling is None else f"{record.of_ceiling:.0%}",
        "" if record.peer_tokens_per_s is None else f"{record.peer_tokens_per_s:.0f}",
        "" if record.ratio is None else f"{record.ratio:.2f}x",
    )


if __name__ == "__main__":
    sys.exit(main())
