"""How fast a decode step could be: the bytes that it must read, over the bandwidth of the memory they lie in.

Knows shapes only. Method of the published comparison: dense weights, the experts expected to be hit by a batch
that routes evenly, and the KV of every request at its mean context.
"""

import time
from dataclasses import dataclass

import torch

from headrace.core.model_spec import ModelSpec

COPY_BYTES = 1 << 30
COPIES = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """What a decode step must read, by what reads it."""

    experts: float  # routed ones
    dense: float  # all other weights
    kv: float

    @property
    def total(self) -> float:
        return self.experts + self.dense + self.kv


def step_bytes(
    spec: ModelSpec, num_parameters: int, batch: int, context: float, weight_bytes: float, kv_bytes: int
) -> StepBytes:
    """Bytes that one decode step of `batch` requests must read.

    Args:
        spec: the model.
        num_parameters: of the main model, MTP modules left out.
        batch: requests.
        context: mean KV length, tokens.
        weight_bytes: per parameter, scales included.
        kv_bytes: per token, all layers.
    """
    experts = 0.0
    hit = 0.0
    if spec.moe is not None:
        moe = spec.moe
        one = 3.0 * spec.hidden_size * moe.intermediate_size
        layers = sum(spec.moe_layers)
        experts = one * moe.num_experts * layers
        missed = (1 - moe.router.top_k / moe.num_experts) ** batch
        hit = one * moe.num_experts * (1 - missed) * layers
    # Of the embedding table only the batch's own rows are read, unless it is the output head too.
    embedding = 0 if spec.tied_embeddings else spec.vocab_size * spec.hidden_size
    dense = num_parameters - experts - embedding
    return StepBytes(experts=hit * weight_bytes, dense=dense * weight_bytes, kv=batch * context * kv_bytes)


def copy_bandwidth(device: torch.device) -> float:
    """Bytes per second, read plus written, of a large copy within the device's memory."""
    source = torch.randint(0, 255, (COPY_BYTES // (1 if device.type == "cuda" else 8),), dtype=torch.uint8)
    source = source.to(device)
    target = torch.empty_like(source)
    best = float("inf")
    for _ in range(COPIES):
        _wait(device)
        begin = time.perf_counter()
        target.copy_(source)
        _wait(device)
        best = min(best, time.perf_counter() - begin)
    return 2 * source.numel() / best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
