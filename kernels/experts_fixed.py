"""The routed experts of a step where a token's result must not depend on how many others there are.

One path for every number of tokens; the shape of its tiles moves no bit. Called by fixed.
"""

import torch
from torch import Tensor

from headrace.kernels.expert_sort import launch_expert_sort
from headrace.kernels.experts_cuda import ExpertsTuning, experts_tuning
from headrace.kernels.experts_tiles import TileTuning, launch_combine, launch_down, launch_gate_up
from headrace.kernels.fp8_block import Fp8Weight
from headrace.kernels.fp8_tiles import launch_fp8_tiles, launch_quantize_rows
from headrace.kernels.linear_fixed import FP8_TUNING

_FLOAT32 = TileTuning(block_n=32, block_k=32, num_warps=4, num_stages=2)


def launch_experts_fixed(
    x: Tensor,
    gate_up: Tensor | Fp8Weight,
    down: Tensor | Fp8Weight,
    ids: Tensor,
    scales: Tensor,
    base: Tensor,
) -> Tensor:
    """As kernels.experts.experts; `base` is given."""
    if isinstance(gate_up, Fp8Weight) and isinstance(down, Fp8Weight):
        order = launch_expert_sort(ids, gate_up.shape[0], 64)
        rows = launch_quantize_rows(x)
        hidden = launch_fp8_tiles(rows, gate_up, x.dtype, order=order, top_k=ids.shape[1], tuning=FP8_TUNING)
        rows = launch_quantize_rows(hidden, swiglu_first=True)
        parts = launch_fp8_tiles(rows, down, x.dtype, order=order, shares=scales, tuning=FP8_TUNING)
    elif isinstance(gate_up, Fp8Weight) or isinstance(down, Fp8Weight):
        raise ValueError("gate_up, down: either both are fp8 or neither")
    else:
        tuning = experts_tuning(ids.numel() // gate_up.shape[0])
        if x.dtype is torch.float32:
            tuning = ExpertsTuning(16, _FLOAT32, _FLOAT32)
        order = launch_expert_sort(ids, gate_up.shape[0], tuning.block_m)
        hidden = launch_gate_up(x, gate_up, order, ids.shape[1], tuning.gate_up)
        parts = launch_down(hidden, down, scales, order, torch.float32, tuning.down)
    return launch_combine(parts, ids.shape[1], x.dtype, base)
