"""Trains the embedded model within a wall-clock budget and exports it.

`PYTHONPATH=. python -P -m training.train --data DIR --out DIR --minutes 8`; the data is prepare.py's.
"""

import argparse
import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from training.data import Mixture, load_streams
from training.evaluate import nats_per_token
from training.export import export, load_export
from training.model import MTP_DEPTH, TEACHER, Block, Losses, Model, draft_losses, text_loss
from training.optim import make_optimizers, scale_rates
from training.shape import FULL, SMALL

WEIGHTS = {
    "chats": 0.68,
    "01": 0.026,
    "02": 0.147,
    "03": 0.003,
    "04": 0.032,
    "06": 0.022,
    "07": 0.035,
    "08": 0.055,
}
"""Share of rows by source: docs/training.md tells how they were chosen."""

_WARM_UP = 100  # steps
_DECAY_FROM = 0.55  # of the budget; from here the rates fall linearly ...
_LAST_RATE = 0.01  # ... to this part
_MTP_HEAVY_FROM = 0.7
_CLIP = 1.0


@dataclass(frozen=True, slots=True)
class Moment:
    """Where a run stands: all schedules are functions of it, so that a run fits any budget."""

    step: int
    spent: float  # part of the budget

    @property
    def rate(self) -> float:
        """Learning rates over their full ones."""
        fall = 1.0 if self.spent < _DECAY_FROM else (1 - self.spent) / (1 - _DECAY_FROM)
        return min(1.0, (self.step + 1) / _WARM_UP) * max(fall, _LAST_RATE)

    @property
    def mtp_weight(self) -> float:
        """Weight of the MTP loss."""
        return 0.3 if self.spent < _MTP_HEAVY_FROM else 0.5

    @property
    def balance_rate(self) -> float:
        """Step of the routing bias: quick at first, then slow, frozen at the end."""
        if self.step < 300:
            return 1e-2
        return 1e-3 if self.spent < 0.9 else 0.0


def compile_parts(model: Model) -> None:
    """Compile block by block: the layers share one graph, which is far quicker than compiling the whole model."""
    for module in model.modules():
        if isinstance(module, Block):
            module.compile(dynamic=False)
    model.text_loss = torch.compile(text_loss, dynamic=False)
    model.draft_losses = torch.compile(draft_losses, dynamic=False)


def train_step(
    model: Model, rows: torch.Tensor, optimizers: list[torch.optim.Optimizer], moment: Moment
) -> tuple[Losses, torch.Tensor]:
    """One update; returns the losses and the largest load of an expert over the mean."""
    with torch.autocast(rows.device.type, torch.bfloat16):
        losses = model.losses(rows)
    mtp = (1 - TEACHER) * losses.mtp + TEACHER * losses.imitation
    (losses.main + moment.mtp_weight * mtp.mean()).backward()
    nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
    scale_rates(optimizers, moment.rate)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    loads = [layer.balance(moment.balance_rate) for layer in model.experts()]
    return losses, torch.stack(loads).max()


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--minutes", type=float, default=8.0, help="for training; export and evaluation come after"
    )
    parser.add_argument("--until", type=float, help="end training at this Unix time, if that is earlier")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rows", type=int, default=64, help="per step")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--small", action="store_true", help="the 2.4M-parameter shape")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--report-every", type=int, default=100, help="steps")
    return parser.parse_args()


def main() -> None:
    """Train, export, measure."""
    options = parse_arguments()
    torch.manual_seed(0)
    device = torch.device(options.device)
    model = Model(SMALL if options.small else FULL).to(device).train()
    length = options.context + 1 + MTP_DEPTH
    mixture = Mixture(load_streams(options.data / "train"), WEIGHTS, length=length, seed=0, device=device)
    optimizers = make_optimizers(model)
    if not options.no_compile:
        compile_parts(model)
    began = time.time()
    budget = options.minutes * 60
    if options.until:
        budget = min(budget, options.until - began)
    if budget <= 0:
        raise SystemExit("no time is left to train")
    step, first = 0, began
    while (spent := (time.time() - began) / budget) < 1:
        losses, load = train_step(model, mixture.rows(options.rows), optimizers, Moment(step, spent))
        step += 1
        if step % 10 == 0 and device.type == "cuda":
            # the host would run far ahead of the device, and the budget is the device's
            torch.cuda.synchronize()
        if step == 10:
            first = time.time()
        if step % options.report_every == 0:
            tokens = options.rows * options.context
            rate = (step - 10) * tokens / (time.time() - first)
            depths = ", ".join(f"{value:.3f}" for value in [*losses.mtp.tolist(), *losses.imitation.tolist()])
            print(
                f"{time.time() - began:5.0f} s step {step} {step * tokens / 1e6:.1f}M tokens, {rate:.0f}/s, "
                f"loss {losses.main.item():.3f}, mtp {depths}, load {load.item():.2f}",
                flush=True,
            )
    print(f"{step} steps in {time.time() - began:.0f} s", flush=True)
    size = export(model, options.out)
    print(f"exported {size / 1e6:.1f} MB", flush=True)
    held_out = load_streams(options.data / "held_out")
    # of the weights as they will be served: fp8, read back
    nats = nats_per_token(load_export(options.out), held_out, device, context=options.context, limit=262_144)
    (options.out / "nats.json").write_text(json.dumps(nats, indent=1) + "\n")
    print(json.dumps(nats), flush=True)


if __name__ == "__main__":
    main()
