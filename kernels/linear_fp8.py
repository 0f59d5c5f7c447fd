"""Which kernels a product with a dense fp8 weight takes on a card, by tokens. Called by linear."""

import torch
import triton
from torch import Tensor

from headrace.kernels.fp8_block import BLOCK, Fp8Weight
from headrace.kernels.fp8_few import FewTuning, launch_few_linear
from headrace.kernels.fp8_split import launch_split_rows
from headrace.kernels.fp8_tiles import launch_fp8_tiles, launch_quantize_rows

FEW_TOKENS = 64  # up to which rows are as exact as bf16
FEWER_TOKENS = 16  # up to which that beats the vendor's wide product however wide the weight
_PROGRAMS = 160  # that ask for a weight's parts at once: more take longer to add up


def beats_wide(T: int, N: int, K: int) -> bool:
    """Whether the weight's bytes outweigh two more launches. Measured on an H200."""
    return K % BLOCK == 0 and (T <= FEWER_TOKENS or (T <= FEW_TOKENS and N <= K))


def linear_fp8(x: Tensor, weight: Fp8Weight, add_to: Tensor | None) -> Tensor:
    """[T, K] x [N, K] -> [T, N] for T > 1; into `add_to`, added, where given."""
    (T, K), N = x.shape, weight.shape[0]
    if FEW_TOKENS >= T and K % BLOCK == 0:
        block_m = max(16, triton.next_power_of_2(T))
        splits = max(1, min(_PROGRAMS // triton.cdiv(N, 64), K // BLOCK // 8))
        tuning = FewTuning(block_n=64, num_warps=4, num_stages=4)
        return launch_few_linear(launch_split_rows(x), weight, x.dtype, add_to, block_m, splits, tuning)
    out = launch_fp8_tiles(launch_quantize_rows(x), weight, x.dtype)
    return out if add_to is None else torch.add(add_to, out, out=add_to)
