"""Which kernels the routed experts of a step take on a card, by tokens and weight format. Called by experts."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headrace.kernels.expert_sort import launch_expert_sort
from headrace.kernels.experts_fp8 import experts_fp8
from headrace.kernels.experts_many import launch_down_many, launch_gate_up_many, takes_many
from headrace.kernels.experts_one import launch_experts_one
from headrace.kernels.experts_tiles import TileTuning, launch_combine, launch_down, launch_gate_up
from headrace.kernels.fp8_block import Fp8Weight
from headrace.kernels.tuned import tuned

TIERS = (12, 32, 96, 256)  # mean tokens of an expert from which other tiles pay


@dataclass(frozen=True, slots=True)
class ExpertsTuning:
    """Launch choices: tokens of a tile, then each product's own."""

    block_m: int
    gate_up: TileTuning
    down: TileTuning
    copies: bool = False  # by the kernels whose weights the copy engine brings, where it can read them


def experts_cuda(
    x: Tensor,
    gate_up: Tensor | Fp8Weight,
    down: Tensor | Fp8Weight,
    ids: Tensor,
    scales: Tensor,
    base: Tensor | None,
    tuning: ExpertsTuning | None = None,
) -> Tensor:
    """See kernels.experts.experts.

    Args:
        tuning: of the products over tiles, for weights that are not fp8; None = the table's.
    """
    if x.stride(1) != 1 or not scales.is_contiguous():
        raise ValueError(f"x, scales: rows must be contiguous, strides {x.stride()}, {scales.stride()}")
    T, top_k = ids.shape
    if isinstance(gate_up, Fp8Weight) and isinstance(down, Fp8Weight):
        return experts_fp8(x, gate_up, down, ids, scales, base)
    if isinstance(gate_up, Fp8Weight) or isinstance(down, Fp8Weight):
        raise ValueError("gate_up, down: either both are fp8 or neither")
    if T == 1 and tuning is None:
        return launch_experts_one(x, gate_up, down, ids, scales, base)
    per_expert = ids.numel() // gate_up.shape[0]
    if tuning is None:
        tuning = experts_tuning(per_expert, gate_up)
        if x.dtype is torch.float32:
            tuning = _halved(tuning)
    order = launch_expert_sort(ids, gate_up.shape[0], tuning.block_m)
    if tuning.copies and takes_many(gate_up, down):
        hidden = launch_gate_up_many(x, gate_up, order, top_k, tuning.gate_up)
        return launch_combine(
            launch_down_many(hidden, down, scales, order, tuning.down), top_k, x.dtype, base
        )
    hidden = launch_gate_up(x, gate_up, order, top_k, tuning.gate_up)
    # Float32 parts are small beside the weights until every expert has a full tile.
    parts_dtype = torch.float32 if per_expert < 32 else x.dtype
    parts = launch_down(hidden, down, scales, order, parts_dtype, tuning.down)
    return launch_combine(parts, top_k, x.dtype, base)


def experts_tuning(per_expert: int, gate_up: Tensor | None = None) -> ExpertsTuning:
    """By the mean number of tokens an expert gets: small tiles stream weights, large ones fill tensor cores.

    Args:
        per_expert: tokens.
        gate_up: [E, 2F, D]; None = by the rule, whatever was measured.
    """
    tier = sum(per_expert >= bound for bound in TIERS)
    if gate_up is not None and (found := tuned("experts", gate_up, (*gate_up.shape, tier))) is not None:
        gate_up_choice, down_choice = TileTuning(**found["gate_up"]), TileTuning(**found["down"])
        return ExpertsTuning(found["block_m"], gate_up_choice, down_choice, found["copies"])
    return _rule(tier)


def _rule(tier: int) -> ExpertsTuning:
    if tier == 0:
        return ExpertsTuning(
            block_m=16,
            gate_up=TileTuning(block_n=32, block_k=128, num_warps=4, num_stages=4),
            down=TileTuning(block_n=64, block_k=128, num_warps=4, num_stages=4),
        )
    if tier == 1:
        return ExpertsTuning(
            block_m=32,
            gate_up=TileTuning(block_n=64, block_k=128, num_warps=4, num_stages=3),
            down=TileTuning(block_n=64, block_k=128, num_warps=4, num_stages=3),
        )
    if tier == 2:
        return ExpertsTuning(
            block_m=64,
            gate_up=TileTuning(block_n=64, block_k=64, num_warps=4, num_stages=4),
            down=TileTuning(block_n=128, block_k=64, num_warps=4, num_stages=3),
        )
    return ExpertsTuning(
        block_m=128,
        gate_up=TileTuning(block_n=128, block_k=64, num_warps=8, num_stages=4),
        down=TileTuning(block_n=256, block_k=64, num_warps=8, num_stages=4),
        copies=True,
    )


def _halved(tuning: ExpertsTuning) -> ExpertsTuning:
    """For numbers of four bytes, which fill shared memory twice as fast."""
    return replace(
        tuning,
        gate_up=replace(tuning.gate_up, block_k=tuning.gate_up.block_k // 2),
        down=replace(tuning.down, block_k=tuning.down.block_k // 2),
    )
