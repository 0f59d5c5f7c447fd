"""`headrace bench accuracy`: what a format of weights costs, in logits and in perplexity, against a wider one.

The same tokens go through the model in each format; the first is the measure of the others.
`python -P -m headrace.core.bench.accuracy -h`.
"""

import argparse
import gc
import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from headrace.config import ConfigError, LoadFormat, Quantization, embedded_model
from headrace.core.batch import Batch
from headrace.core.bench.record import card, commit, versions
from headrace.core.bench.workload import read_tokens
from headrace.core.models.base import Model
from headrace.core.weights import load_model

PROGRAM = "headrace bench accuracy"
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Format:
    """How weights are held."""

    dtype: torch.dtype | None  # None = float32 on a CPU, bfloat16 on a card
    quantization: Quantization
    keep_fp8: bool | None  # None = where there are kernels for it: on a card


FORMATS: Mapping[str, Format] = {
    "float32": Format(torch.float32, "", False),
    "bfloat16": Format(torch.bfloat16, "", False),
    "float16": Format(torch.float16, "", False),
    "fp8": Format(None, "fp8", None),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyRecord:
    """One format on one set of tokens, against the first format named."""

    model: str
    format: str
    reference: str
    num_tokens: int
    chunk: int  # query tokens of a pass; 0 = all of a text
    relative_rms: float  # of the logits' difference, over the spread of the reference's logits
    top1_agreement: float  # share of positions where both name the same likeliest token
    mean_kl: float  # nats, of the format's distribution from the reference's
    nats_per_token: float  # of the text itself
    perplexity: float
    device: str
    versions: Mapping[str, str]
    commit: str


def main() -> int:
    """Measure each format, print a table, append records."""
    found = _parse()
    console = Console(width=None if sys.stdout.isatty() else 140)
    try:
        records = measure(
            Path(found.model) if found.model else embedded_model(),
            found.formats,
            device=torch.device(found.device),
            load_format=found.load_format,
            texts=None if found.tokens is None else read_tokens(found.tokens),
            prompts=found.prompts,
            chunk=found.chunk,
        )
    except ConfigError as error:
        console.print(f"{PROGRAM}: {error}")
        return 1
    table = Table("format", "tokens", "relative RMS", "top-1 agreement", "mean KL", "nats", "perplexity")
    for record in records:
        table.add_row(
            record.format,
            str(record.num_tokens),
            f"{record.relative_rms:.2e}",
            f"{record.top1_agreement:.4f}",
            f"{record.mean_kl:.2e}",
            f"{record.nats_per_token:.4f}",
            f"{record.perplexity:.3f}",
        )
        found.record.parent.mkdir(parents=True, exist_ok=True)
        with found.record.open("a") as file:
            file.write(json.dumps(asdict(record)) + "\n")
    console.print(f"{records[0].model}, against {records[0].reference}, {records[0].device}")
    console.print(table)
    return 0


def measure(
    path: Path,
    formats: Sequence[str],
    *,
    device: torch.device,
    load_format: LoadFormat = "safetensors",
    texts: Sequence[Sequence[int]] | None = None,
    prompts: tuple[int, int] = (8, 256),
    chunk: int = 0,
) -> list[AccuracyRecord]:
    """Run the texts through each format. One model is in memory at a time.

    Args:
        path: a Hugging Face folder.
        formats: names in FORMATS; the first is the reference.
        texts: token ids; None = `prompts` random ones (count, tokens each).
        chunk: query tokens of a pass, as decoding (1) or speculating (a few) would have them; 0 = a whole text.

    Raises:
        ConfigError: the folder cannot be loaded.
    """
    expected: list[Tensor] = []
    records = []
    for name in formats:
        form = FORMATS[name]
        dtype = form.dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        model = load_model(
            path,
            dtype=dtype,
            device=device,
            load_format=load_format,
            quantization=form.quantization,
            keep_fp8=form.keep_fp8,
        )
        if texts is None:
            generator = torch.Generator().manual_seed(0)
            texts = torch.randint(model.spec.vocab_size, prompts, generator=generator).tolist()
        tally = _Tally()
        for i, text in enumerate(texts):
            logits = text_logits(model, text, chunk)
            if len(expected) <= i:
                expected.append(logits.cpu())
            tally.add(logits, expected[i].to(device), torch.tensor(text, device=device))
        records.append(tally.record(path.name, name, formats[0], chunk, device))
        del model
        # The next one needs its memory, which cycles keep until they are looked for.
        gc.collect()
        torch.cuda.empty_cache()
    return records


def text_logits(model: Model, text: Sequence[int], chunk: int) -> Tensor:
    """[len(text), V] float32, `chunk` tokens at a time."""
    blocks = -(-len(text) // BLOCK_SIZE)
    pool = torch.zeros(model.kv_shape(blocks + 1, BLOCK_SIZE), dtype=model.dtype, device=model.device)
    size = chunk or len(text)
    return torch.cat(
        [
            model.logits(model.forward(_batch(text[: start + size], start, model.device), pool))
            for start in range(0, len(text), size)
        ]
    )


class _Tally:
    """Sums over positions."""

    def __init__(self) -> None:
        self._tokens = 0
        self._squares = 0.0
        self._spread = 0.0
        self._same = 0.0
        self._divergence = 0.0
        self._nats = 0.0
        self._foretold = 0

    def add(self, found: Tensor, expected: Tensor, text: Tensor) -> None:
        """[T, V] logits of both, and the [T] tokens they were computed from."""
        self._tokens += len(text)
        self._squares += float((found - expected).square().mean(-1).sum())
        self._spread += float(expected.var(-1).sum())
        self._same += float((found.argmax(-1) == expected.argmax(-1)).sum())
        likely, reference = found.log_softmax(-1), expected.log_softmax(-1)
        self._divergence += float((reference.exp() * (reference - likely)).sum())
        self._nats -= float(likely[:-1].gather(1, text[1:, None]).sum())
        self._foretold += len(text) - 1

    def record(
        self, model: str, name: str, reference: str, chunk: int, device: torch.device
    ) -> AccuracyRecord:
        nats = self._nats / self._foretold
        return AccuracyRecord(
            model=model,
            format=name,
            reference=reference,
            num_tokens=self._tokens,
            chunk=chunk,
            relative_rms=math.sqrt(self._squares / self._spread),
            top1_agreement=self._same / self._tokens,
            mean_kl=self._divergence / self._tokens,
            nats_per_token=nats,
            perplexity=math.exp(nats),
            device=card(device),
            versions=versions(),
            commit=commit(),
        )


def _batch(text: Sequence[int], start: int, device: torch.device) -> Batch:
    """The tokens from `start` on of one row, whose blocks follow each other."""
    blocks = -(-len(text) // BLOCK_SIZE)
    count = len(text) - start
    positions = torch.arange(start, len(text), device=device)
    return Batch(
        token_ids=torch.tensor(text[start:], device=device),
        positions=positions,
        slot_mapping=positions + BLOCK_SIZE,
        query_starts=torch.tensor([0, count], dtype=torch.int32, device=device),
        context_lens=torch.tensor([len(text)], dtype=torch.int32, device=device),
        block_tables=torch.arange(1, blocks + 1, dtype=torch.int32, device=device)[None],
        num_decodes=int(count == 1),
        max_query_len=count,
        max_context_len=len(text),
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=PROGRAM, description=__doc__)
    parser.add_argument("--model", default="", help="Hugging Face folder; the embedded model if left out")
    parser.add_argument("--load-format", default="safetensors", choices=("safetensors", "dummy"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--formats", type=_formats, default=("float32", "bfloat16", "fp8"), help=f"of {', '.join(FORMATS)}"
    )
    parser.add_argument(
        "--tokens", type=Path, help="JSON list of lists of token ids; random ones if left out"
    )
    parser.add_argument("--prompts", type=_shape, default=(8, 256), help="random texts x tokens (8x256)")
    parser.add_argument("--chunk", type=int, default=0, help="query tokens of a pass; 0 = a whole text")
    parser.add_argument("--record", type=Path, default=Path("loadtest/results/accuracy.jsonl"))
    return parser.parse_args()


def _formats(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in FORMATS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(FORMATS)}")
    return names


def _shape(text: str) -> tuple[int, int]:
    count, _, tokens = text.partition("x")
    return int(count), int(tokens)


if __name__ == "__main__":
    sys.exit(main())
