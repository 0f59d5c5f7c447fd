"""`headrace bench engine`: decode steps of one engine by batch size, beside their ceiling and, if asked, a peer.

Runs the correctness check first and reports nothing without it. `python -P -m headrace.core.bench.engine -h`.
"""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from headrace.config import CacheConfig, Config, ConfigError, EngineConfig, ModelConfig, SchedulerConfig
from headrace.core.bench.ceiling import copy_bandwidth, step_bytes
from headrace.core.bench.check import WrongAnswer, check_decode
from headrace.core.bench.record import EngineRecord, append, card, commit, versions
from headrace.core.bench.transformers_peer import load_peer, time_peer
from headrace.core.bench.workload import DecodeShape, StepTimes, time_decode
from headrace.core.build import Built, build
from headrace.core.weights import needed_shapes

# Nats by which rounding alone may reorder two tokens; bfloat16 carries 8 bits.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}


def main() -> int:
    """Measure, print a table, append records."""
    arguments = _parse()
    console = Console()
    try:
        config = _config(arguments).resolve()
        built = build(config)
        vocab_size = built.model.spec.vocab_size
        check_decode(built.engine, vocab_size, TOLERANCE[built.model.dtype])
    except (ConfigError, WrongAnswer) as error:
        console.print(f"headrace bench: {error}")
        return 1
    shape = DecodeShape(*arguments.prompt_tokens, *arguments.outputs)
    bandwidth = copy_bandwidth(built.model.device)
    peer = None
    if arguments.peer == "transformers":
        peer = time_peer(load_peer(Path(config.model.path)), vocab_size, shape, arguments.repeats)
    table = Table(
        "batch", "ms a step", "spread", "tokens/s", "ceiling ms", "of ceiling", "peer tokens/s", "ratio"
    )
    for batch in arguments.batches:
        times = time_decode(built.engine, vocab_size, batch, shape, arguments.repeats)
        record = _record(config, built, batch, times, _ceiling(built, batch, shape, bandwidth), peer)
        append(arguments.record, record)
        table.add_row(*_cells(record))
    console.print(f"{config.model.served_name}, {record.dtype}, {record.card}, commit {record.commit}")
    console.print(f"copy bandwidth {bandwidth / 1e9:.1f} GB/s; decode = prefill checked")
    console.print(table)
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="headrace bench engine", description=__doc__)
    parser.add_argument("--model", default="", help="Hugging Face folder; the embedded model if left out")
    parser.add_argument("--load-format", default="safetensors", choices=("safetensors", "dummy"))
    parser.add_argument(
        "--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float16"), help="of the weights"
    )
    parser.add_argument("--batches", type=_numbers, default=[1, 8, 32], help="comma-separated (1,8,32)")
    parser.add_argument("--prompt-tokens", type=_numbers, default=[128, 512], help="shortest,longest")
    parser.add_argument("--outputs", type=_numbers, default=[32, 256], help="the two output lengths")
    parser.add_argument("--repeats", type=int, default=3, help="timed pairs of runs; the median counts")
    parser.add_argument("--peer", choices=("transformers",), help="measure it in the same run, at batch 1")
    parser.add_argument("--threads", type=int, default=0, help="of the CPU")
    parser.add_argument("--kv-memory", type=int, default=CacheConfig().memory_bytes, help="bytes")
    parser.add_argument("--max-num-batched-tokens", type=int, default=512, help="query tokens of a step")
    parser.add_argument("--record", type=Path, default=Path("loadtest/results/engine.jsonl"))
    return parser.parse_args()


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def _config(arguments: argparse.Namespace) -> Config:
    most = max(arguments.batches)
    budget = max(arguments.max_num_batched_tokens, most)
    return Config(
        model=ModelConfig(
            path=arguments.model,
            load_format=arguments.load_format,
            dtype=arguments.dtype,
        ),
        # Cached prefixes would turn later prefills into nothing, and the prompts are random anyway.
        cache=CacheConfig(memory_bytes=arguments.kv_memory, prefix_cache=False),
        scheduler=SchedulerConfig(
            max_num_seqs=most,
            max_num_batched_tokens=budget,
            max_waiting=max(SchedulerConfig().max_waiting, most),
        ),
        engine=EngineConfig(threads=arguments.threads),
    )


def _ceiling(built: Built, batch: int, shape: DecodeShape, bandwidth: float) -> float:
    """Milliseconds."""
    model, spec = built.model, built.model.spec
    context = (shape.shortest + shape.longest) / 2 + (shape.few + shape.many) / 2
    kv_bytes = model.kv_bytes_per_block(1, model.dtype)
    main = needed_shapes(replace(spec, num_mtp=0))
    num_parameters = sum(math.prod(dims) for dims in main.values())
    size = step_bytes(spec, num_parameters, batch, context, model.dtype.itemsize, kv_bytes)
    return size / bandwidth * 1e3


def _record(
    config: Config, built: Built, batch: int, times: StepTimes, ceiling_ms: float, peer: StepTimes | None
) -> EngineRecord:
    tokens_per_s = batch / times.median * 1e3
    peer_tokens_per_s = None if peer is None or batch != 1 else 1e3 / peer.median
    device = built.model.device
    return EngineRecord(
        bench="decode",
        model=config.model.served_name,
        dtype=str(built.model.dtype).removeprefix("torch."),
        batch=batch,
        step_ms=times.median,
        step_ms_spread=(times.smallest, times.largest),
        tokens_per_s=tokens_per_s,
        ceiling_ms=ceiling_ms,
        of_ceiling=ceiling_ms / times.median,
        peer="" if peer_tokens_per_s is None else "transformers",
        peer_tokens_per_s=peer_tokens_per_s,
        ratio=None if peer_tokens_per_s is None else tokens_per_s / peer_tokens_per_s,
        card=card(device),
        threads=0 if device.type == "cuda" else torch.get_num_threads(),
        versions=versions(),
        commit=commit(),
    )


def _cells(record: EngineRecord) -> tuple[str, ...]:
    low, high = record.step_ms_spread
    return (
        str(record.batch),
        f"{record.step_ms:.2f}",
        f"{low:.2f} - {high:.2f}",
        f"{record.tokens_per_s:.0f}",
        f"{record.ceiling_ms:.2f}",
        f"{record.of_ceiling:.0%}",
        "" if record.peer_tokens_per_s is None else f"{record.peer_tokens_per_s:.0f}",
        "" if record.ratio is None else f"{record.ratio:.1f}x",
    )


if __name__ == "__main__":
    sys.exit(main())
