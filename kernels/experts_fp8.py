"""Which kernels the routed experts take on a card where their weights are fp8, by tokens. Called by experts_cuda."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.expert_sort import launch_expert_sort
from headrace.kernels.experts_one_fp8 import launch_experts_one_fp8
from headrace.kernels.experts_tiles import launch_combine
from headrace.kernels.fp8_block import Fp8Weight
from headrace.kernels.fp8_few import FewTuning, launch_few_down, launch_few_gate_up
from headrace.kernels.fp8_many import ManyTuning, launch_many_gate_up
from headrace.kernels.fp8_split import launch_split_rows
from headrace.kernels.fp8_tiles import Fp8Tuning, launch_fp8_tiles, launch_quantize_rows


@dataclass(frozen=True, slots=True)
class FewExpertsTuning:
    """Launch choices where weights are streamed: tokens of a tile, then each product's own."""

    block_m: int
    gate_up: FewTuning
    down: FewTuning


@dataclass(frozen=True, slots=True)
class ManyExpertsTuning:
    """Launch choices where tensor cores are filled: tokens of a tile, then each product's own."""

    block_m: int
    gate_up: ManyTuning
    down: Fp8Tuning


def experts_fp8(
    x: Tensor,
    gate_up: Fp8Weight,
    down: Fp8Weight,
    ids: Tensor,
    scales: Tensor,
    base: Tensor | None,
    tuning: FewExpertsTuning | ManyExpertsTuning | None = None,
) -> Tensor:
    """See kernels.experts.experts. D and F are multiples of 128.

    Args:
        tuning: None = one token's kernels for one token, else the table's.
    """
    if tuning is None:
        if x.shape[0] == 1:
            return launch_experts_one_fp8(x, gate_up, down, ids, scales, base)
        tuning = experts_fp8_tuning(ids.numel() // gate_up.shape[0])
    top_k = ids.shape[1]
    order = launch_expert_sort(ids, gate_up.shape[0], tuning.block_m)
    if isinstance(tuning, FewExpertsTuning):
        hidden = launch_few_gate_up(launch_split_rows(x), gate_up, order, top_k, x.dtype, tuning.gate_up)
        parts = launch_few_down(launch_split_rows(hidden), down, scales, order, torch.float32, tuning.down)
    else:
        rows = launch_many_gate_up(launch_quantize_rows(x), gate_up, order, top_k, tuning.gate_up)
        parts = launch_fp8_tiles(rows, down, x.dtype, order=order, shares=scales, tuning=tuning.down)
    return launch_combine(parts, top_k, x.dtype, base)


def experts_fp8_tuning(per_expert: int) -> FewExpertsTuning | ManyExpertsTuning:
    """By the mean number of tokens an expert gets: streaming weights, or filling tensor cores."""
    if per_expert < 16:
        few = FewTuning(block_n=128, num_warps=8, num_stages=3)
        # Fewer programs that read more each, once there is work for all.
        gate_up = FewTuning(block_n=256 if per_expert else 128, num_warps=8, num_stages=3)
        return FewExpertsTuning(16, gate_up, few)
    if per_expert < 128:
        down = Fp8Tuning(block_m=64, block_n=128, num_warps=4, num_stages=4)
        return ManyExpertsTuning(64, ManyTuning(num_warps=8, num_stages=4), down)
    down = Fp8Tuning(block_m=64, block_n=128, num_warps=4, num_stages=3, max_registers=168)
    return ManyExpertsTuning(128, ManyTuning(num_warps=8, num_stages=3), down)
