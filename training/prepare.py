"""Turns the corpus and the generator into token streams on disk: train/ and held_out/, one file per source.

`PYTHONPATH=. python -P -m training.prepare --corpus DIR --out DIR`; train.py and evaluate.py read the result.
"""

import argparse
import functools
import itertools
import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
from tokenizers import Tokenizer

from training.corpus import Document, read_corpus
from training.data import Stream, Tokens
from training.generator.chats import HELD_OUT_SEED, chat_text
from training.generator.tables import Tables, load_tables
from training.split import held_out

END_OF_TEXT = 0
GENERATOR = "chats"
"""The name of the generator's stream."""
EMBEDDED = Path(__file__).resolve().parents[1] / "src/headrace/embedded"
_TEXTS_PER_JOB = 1000
_SEEDS_PER_JOB = 4000


@dataclass(frozen=True, slots=True)
class Job:
    """Texts to tokenise, given or named by the generator's seeds."""

    side: str  # "train" or "held_out"
    source: str
    texts: tuple[str, ...] = ()
    seeds: range = range(0)


@functools.cache
def _tokenizer(path: str) -> Tokenizer:
    return Tokenizer.from_file(path)


@functools.cache
def _tables() -> Tables:
    return load_tables()


def tokenise(job: Job, tokenizer: str) -> tuple[Job, list[Tokens]]:
    """One array per text, each closed by END_OF_TEXT."""
    texts = [*job.texts, *(chat_text(seed, _tables()) for seed in job.seeds)]
    encodings = _tokenizer(tokenizer).encode_batch_fast(texts, add_special_tokens=False)
    return Job(job.side, job.source), [np.array([*e.ids, END_OF_TEXT], dtype=np.uint16) for e in encodings]


def corpus_jobs(documents: Sequence[Document], kept_out: set[int]) -> Iterator[Job]:
    """Shuffled documents of each source and side."""
    sides = {True: "held_out", False: "train"}
    texts: dict[tuple[str, str], list[str]] = {}
    for index, document in enumerate(documents):
        texts.setdefault((sides[index in kept_out], document.source), []).append(document.text)
    for (side, source), members in texts.items():
        Random(0).shuffle(members)  # noqa: S311  (an order, not a secret)
        for first in range(0, len(members), _TEXTS_PER_JOB):
            yield Job(side, source, texts=tuple(members[first : first + _TEXTS_PER_JOB]))


def generator_jobs(chats: int, held_out_chats: int) -> Iterator[Job]:
    """Chats of seeds from 0, and those that only measure."""
    for first in range(0, chats, _SEEDS_PER_JOB):
        yield Job("train", GENERATOR, seeds=range(first, min(first + _SEEDS_PER_JOB, chats)))
    yield Job("held_out", GENERATOR, seeds=range(HELD_OUT_SEED, HELD_OUT_SEED + held_out_chats))


def split_corpus(documents: Sequence[Document], share: float, also: Path | None) -> set[int]:
    """Indices of the held-out documents. What the generator teaches as definitions is never among them."""
    pinned = [f"<|im_start|>assistant\n{text}<|im_end|>" for _, text in _tables().definitions]
    hashes = {int(line) for line in also.read_text().split()} if also else set[int]()
    return held_out([document.text for document in documents], share, pinned, hashes)


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--corpus", type=Path, help="folder of NN_*.txt.xz; without it the generator alone")
    parser.add_argument("--tokenizer", type=Path, default=EMBEDDED / "tokenizer.json")
    parser.add_argument("--chats", type=int, default=600_000, help="seeds of the generator to train on")
    parser.add_argument("--held-out-chats", type=int, default=2_000)
    parser.add_argument(
        "--held-out-share", type=float, default=0.015, help="of the corpus's groups of documents"
    )
    parser.add_argument(
        "--also-hold-out", type=Path, help="file of hashes (split.hash_text) of further documents"
    )
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    return parser.parse_args()


def main() -> None:
    """Prepare and say what came out."""
    options = parse_arguments()
    began = time.monotonic()
    collected: dict[tuple[str, str], list[Tokens]] = {}
    # one thread each: the workers are as many as the cores
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    work = functools.partial(tokenise, tokenizer=str(options.tokenizer))
    with multiprocessing.get_context("spawn").Pool(options.workers) as pool:
        # the workers are busy with chats while this process splits the corpus
        results: Iterator[tuple[Job, list[Tokens]]] = pool.imap(
            work, generator_jobs(options.chats, options.held_out_chats)
        )
        if options.corpus:
            documents = read_corpus(options.corpus)
            kept_out = split_corpus(documents, options.held_out_share, options.also_hold_out)
            print(
                f"{len(documents)} documents, {len(kept_out)} held out, {time.monotonic() - began:.0f} s",
                flush=True,
            )
            results = itertools.chain(results, pool.imap(work, corpus_jobs(documents, kept_out)))
        for job, arrays in results:
            collected.setdefault((job.side, job.source), []).extend(arrays)
    for (side, source), arrays in sorted(collected.items()):
        stream = Stream.join(arrays)
        path = options.out / side / f"{source}.npz"
        path.parent.mkdir(parents=True, exist_ok=True)
        stream.save(path)
        print(f"{side:8} {source:5} {len(stream.starts):7} documents {len(stream.tokens) / 1e6:8.2f}M tokens")
    print(f"prepared in {time.monotonic() - began:.0f} s", flush=True)


if __name__ == "__main__":
    main()
