"""The flags of `headrace bench engine`: what is measured, and on which engines.

Turns them into configurations, one for each model and dtype. Knows no engine. Called by engine.py.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import get_args

from headrace.config import (
    CacheConfig,
    Config,
    ConfigError,
    Drafters,
    DType,
    EngineConfig,
    ModelConfig,
    Quantization,
    SchedulerConfig,
    SpeculationConfig,
)
from headrace.core.bench.workload import DecodeShape, PrefillShape, read_tokens
from headrace.core.hf_config import read_spec

# As the published comparison has it. Longer contexts widen every block table.
MAX_MODEL_LEN = 8192
# Name of a flag's value -> how weights are held, how they are quantised while loading.
DTYPES: Mapping[str, tuple[DType, Quantization]] = {
    "auto": ("auto", ""),
    "float32": ("float32", ""),
    "float16": ("float16", ""),
    "bfloat16": ("bfloat16", ""),
    "bf16": ("bfloat16", ""),
    "fp8": ("bfloat16", "fp8"),
}
PROGRAM = "headrace bench engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchPlan:
    """What one command measures, on each of its engines."""

    configs: tuple[Config, ...]
    decode: DecodeShape
    batches: tuple[int, ...]
    prefills: tuple[PrefillShape, ...]
    trace: Path | None
    profile: bool
    repeats: int
    transformers: bool
    record: Path
    commit: str  # "" = ask git
    acceptance: float | None = None  # of a synthetic drafter; None = the configured drafters


def parse(argv: Sequence[str], description: str | None) -> BenchPlan:
    """Read the flags.

    Raises:
        ConfigError: a model's folder cannot be read.
        SystemExit: a flag is wrong; argparse has said which.
    """
    parser = argparse.ArgumentParser(prog=PROGRAM, description=description)
    _add_engine_flags(parser)
    _add_measurement_flags(parser)
    found = parser.parse_args(argv)
    engines = product(found.model or [""], found.dtype)
    return BenchPlan(
        configs=tuple(_config(found, model, dtype) for model, dtype in engines),
        decode=replace(DecodeShape(*found.prompt_tokens, *found.outputs), given=_given(found.tokens)),
        batches=found.batches,
        prefills=found.prefill,
        trace=found.trace,
        profile=found.profile,
        repeats=found.repeats,
        transformers=found.peer == "transformers",
        record=found.record,
        commit=found.commit,
        acceptance=found.speculate[1],
    )


def _add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        action="append",
        help="Hugging Face folder, may be repeated; the embedded model if left out",
    )
    parser.add_argument("--load-format", default="safetensors", choices=("safetensors", "dummy"))
    parser.add_argument(
        "--dtype",
        type=_dtypes,
        default=("auto",),
        help=f"of the weights, comma-separated: {', '.join(DTYPES)}; fp8 = blocks of 128x128, quantised while loading",
    )
    parser.add_argument(
        "--speculate",
        type=_speculation,
        default=("off", None),
        help=f"who drafts tokens: {', '.join(get_args(Drafters))}, or synthetic:0.7 = anything, right so often",
    )
    parser.add_argument("--threads", type=int, default=0, help="of the CPU")
    parser.add_argument("--kv-memory", type=int, default=0, help="bytes; 0 = what a card has left")
    parser.add_argument(
        "--max-model-len", type=int, default=MAX_MODEL_LEN, help="tokens; at most what the model allows"
    )
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        default=0,
        help="slots; 0 = as many as batches and prompts need, or with --trace the device's own number",
    )
    parser.add_argument(
        "--max-num-batched-tokens",
        type=int,
        default=0,
        help="query tokens of a step; 0 = the device's own limit",
    )


def _add_measurement_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--batches", type=_numbers, default=(1, 8, 32), help="decode, comma-separated (1,8,32); '' = none"
    )
    parser.add_argument("--prompt-tokens", type=_numbers, default=(128, 512), help="shortest,longest")
    parser.add_argument(
        "--tokens", type=Path, help="prompts instead of random ones: JSON list of lists of token ids"
    )
    parser.add_argument("--outputs", type=_numbers, default=(32, 256), help="the two output lengths")
    parser.add_argument(
        "--prefill", type=_prefills, default=(), help="prompts x tokens, comma-separated (32x4096,1x512)"
    )
    parser.add_argument(
        "--trace", type=Path, help="JSON list of [prompt tokens, output tokens], all submitted at once"
    )
    parser.add_argument("--profile", action="store_true", help="print each measured step by kernel")
    parser.add_argument("--repeats", type=int, default=3, help="timed runs of each; the median counts")
    parser.add_argument("--peer", choices=("transformers",), help="measure it in the same run, at batch 1")
    parser.add_argument("--record", type=Path, default=Path("loadtest/results/engine.jsonl"))
    parser.add_argument("--commit", default="", help="what is measured, where there is no git to ask")


def _given(path: Path | None) -> tuple[tuple[int, ...], ...]:
    return () if path is None else tuple(tuple(text) for text in read_tokens(path))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _prefills(text: str) -> tuple[PrefillShape, ...]:
    shapes = []
    for part in text.split(","):
        prompts, _, tokens = part.partition("x")
        shapes.append(PrefillShape(int(prompts), int(tokens)))
    return tuple(shapes)


def _dtypes(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in DTYPES:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(DTYPES)}")
    return names


def _speculation(text: str) -> tuple[Drafters, float | None]:
    """Drafters, and the acceptance of a synthetic one, which takes the n-gram drafter's place."""
    name, _, share = text.partition(":")
    if name == "synthetic":
        try:
            acceptance = float(share)
        except ValueError:
            acceptance = -1.0
        if not 0 <= acceptance <= 1:
            raise argparse.ArgumentTypeError(f"{text!r}: give synthetic:A with A in 0..1")
        return "ngram", acceptance
    for drafters in get_args(Drafters):
        if drafters == text:
            return drafters, None
    raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(get_args(Drafters))}, synthetic:A")


def _config(found: argparse.Namespace, model: str, dtype: str) -> Config:
    needed = max([1, *found.batches, *(shape.prompts for shape in found.prefill)])
    slots = found.max_num_seqs or (0 if found.trace else needed)
    kind, quantization = DTYPES[dtype]
    config = Config(
        model=ModelConfig(
            path=model,
            load_format=found.load_format,
            dtype=kind,
            quantization=quantization,
        ),
        # Cached prefixes would turn later prefills into nothing, and the prompts are random anyway.
        cache=CacheConfig(memory_bytes=found.kv_memory, prefix_cache=False),
        scheduler=SchedulerConfig(
            max_num_seqs=slots,
            max_num_batched_tokens=found.max_num_batched_tokens,
            max_waiting=1 << 20,
        ),
        engine=EngineConfig(threads=found.threads),
        speculation=SpeculationConfig(drafters=found.speculate[0]),
    ).resolve()
    allowed = read_spec(Path(config.model.path)).max_position
    if found.max_model_len < 1:
        raise ConfigError(f"--max-model-len {found.max_model_len} must be at least 1")
    return replace(config, model=replace(config.model, max_model_len=min(found.max_model_len, allowed)))
