"""Judges exported models: nats per token by source, MTP acceptance on held-out chats, answers to read.

`PYTHONPATH=. python -P -m training.evaluate MODEL [MODEL ...] --data DIR`; prints JSON.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from training.data import Stream, load_streams
from training.decode import Decoder, Generation
from training.export import load_export
from training.generator.chat import Turn, render
from training.generator.chats import HELD_OUT_SEED, make_chat
from training.generator.tables import load_tables
from training.model import MTP_DEPTH, Model
from training.prepare import EMBEDDED

STOP_IDS = (2, 0)  # <|im_end|>, <|endoftext|>
DEPTHS = (1, 2, 3)
_ROWS = 8


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Greedy speculative decoding over some prompts, with `depth` drafts a step."""

    depth: int
    by_depth: list[float]  # right drafts among those whose predecessors were right
    tokens_per_step: float  # without the prompt's own step and its token
    identical: int  # prompts whose tokens are those of plain decoding
    prompts: int


@torch.inference_mode()
def nats_per_token(
    model: Model, streams: Mapping[str, Stream], device: torch.device, *, context: int, limit: int
) -> dict[str, list[float]]:
    """By source the mean loss of the trunk and of each MTP depth, over at most `limit` tokens in whole windows."""
    model = model.to(device).eval()
    means: dict[str, list[float]] = {}
    for source, stream in streams.items():
        windows = stream.windows(context + 1 + MTP_DEPTH, max(limit // context, 1))
        if not len(windows):
            continue
        total = torch.zeros(1 + MTP_DEPTH, dtype=torch.float64)
        for rows in torch.split(windows, _ROWS):
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                losses = model.losses(rows.to(device))
            total += torch.cat([losses.main[None], losses.mtp]).double().cpu() * len(rows)
        means[source] = [round(value, 4) for value in (total / len(windows)).tolist()]
    return means


def held_out_prompts(tokenizer: Tokenizer, count: int, longest: int) -> list[list[int]]:
    """Generator chats of seeds never trained on, up to where the last answer begins."""
    tables = load_tables()
    prompts: list[list[int]] = []
    seed = HELD_OUT_SEED
    while len(prompts) < count:
        turns = make_chat(seed, tables)
        seed += 1
        ids = prompt_ids(tokenizer, turns[:-1])
        if len(ids) <= longest:
            prompts.append(ids)
    return prompts


def prompt_ids(tokenizer: Tokenizer, turns: Sequence[Turn]) -> list[int]:
    """The tokens of a chat that waits for the assistant's answer."""
    text = render(turns) + "<|im_start|>assistant\n"
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def acceptance(model: Model, prompts: Sequence[list[int]], limit: int) -> list[Acceptance]:
    """For each number of drafts, over answers of at most `limit` tokens."""
    decoder = Decoder(model, STOP_IDS)
    plain = [decoder.generate(prompt, limit) for prompt in prompts]
    return [
        _summary(depth, plain, [decoder.generate(prompt, limit, depth) for prompt in prompts])
        for depth in DEPTHS
    ]


def _summary(depth: int, plain: Sequence[Generation], speculative: Sequence[Generation]) -> Acceptance:
    drafted = [sum(run.drafted[i] for run in speculative) for i in range(depth)]
    accepted = [sum(run.accepted[i] for run in speculative) for i in range(depth)]
    tokens, steps = sum(len(run.ids) - 1 for run in speculative), sum(run.steps - 1 for run in speculative)
    return Acceptance(
        depth=depth,
        by_depth=[round(right / max(made, 1), 3) for right, made in zip(accepted, drafted, strict=True)],
        tokens_per_step=round(tokens / max(steps, 1), 3),
        identical=sum(a.ids == b.ids for a, b in zip(plain, speculative, strict=True)),
        prompts=len(plain),
    )


def answers(model: Model, tokenizer: Tokenizer, questions: Sequence[str], limit: int) -> list[str]:
    """The greedy answer to each question alone."""
    decoder = Decoder(model, STOP_IDS)
    prompts = [prompt_ids(tokenizer, [Turn("user", question)]) for question in questions]
    return [tokenizer.decode(decoder.generate(prompt, limit).ids).strip() for prompt in prompts]


def main() -> None:
    """Judge each model in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", type=Path, nargs="+")
    parser.add_argument("--data", type=Path, help="folder with held_out/*.npz: measure nats per token")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--limit", type=int, default=32_768, help="tokens per source")
    parser.add_argument("--prompts", type=int, default=0, help="held-out chats to measure MTP acceptance on")
    parser.add_argument("--longest", type=int, default=600, help="tokens of a prompt")
    parser.add_argument("--answer", type=int, default=100, help="tokens of an answer")
    parser.add_argument("--questions", type=Path, help="file with a question a line: print the answers")
    parser.add_argument("--device", default="cpu", help="for nats per token; the rest runs on the CPU")
    parser.add_argument("--tokenizer", type=Path, default=EMBEDDED / "tokenizer.json")
    options = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(options.tokenizer))
    for folder in options.models:
        model = load_export(folder)
        result: dict[str, object] = {"model": str(folder)}
        if options.prompts:
            prompts = held_out_prompts(tokenizer, options.prompts, options.longest)
            result["acceptance"] = [asdict(row) for row in acceptance(model, prompts, options.answer)]
        if options.questions:
            questions = options.questions.read_text().splitlines()
            result["answers"] = dict(
                zip(questions, answers(model, tokenizer, questions, options.answer), strict=True)
            )
        if options.data:
            streams = load_streams(options.data / "held_out")
            device = torch.device(options.device)
            result["nats"] = nats_per_token(
                model, streams, device, context=min(options.context, model.shape.context), limit=options.limit
            )
        print(json.dumps(result, indent=1), flush=True)


if __name__ == "__main__":
    main()
