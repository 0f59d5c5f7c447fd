"""Rows as sums of two fp8 numbers: the rounded one and the rest, both under one scale for the row.

Together they carry 8 bits, as bf16 does, down to a millionth of the row's largest number. So fp8 weights can meet
nearly exact activations on fp8 tensor cores. Called by the products of few rows on a card.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dependent_launch import dependent, wait_and_release
from headrace.kernels.fp8_block import E4M3_MAX
from headrace.kernels.fp8_tiles import LEAST


@dataclass(frozen=True, slots=True)
class SplitRows:
    """Activations as the products of few rows take them."""

    values: Tensor  # [R, 2, K] float8_e4m3fn: rounded, rest
    scales: Tensor  # [R] float32


@triton.jit
def _round_to_four_bits(x):
    """To the nearest float32 of e4m3's significant bits, ties to even.

    Not by way of e4m3 and back: ptxas 12.8 reads a pair of numbers back from a register it never wrote.
    """
    bits = x.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _split_rows_kernel(
    x_ptr,  # [R, K]
    values_ptr,  # [R, 2, K]
    scales_ptr,  # [R]
    K,
    x_stride,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    i_r = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < K
    wait_and_release(PDL)
    b_x = tl.load(x_ptr + i_r * x_stride + offs, mask=mask, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(b_x), 0), LEAST) / LARGEST
    b_x = tl.minimum(tl.maximum(b_x / scale, -LARGEST), LARGEST)
    high = _round_to_four_bits(b_x)
    p_out = values_ptr + i_r * 2 * K + offs
    tl.store(p_out, high.to(values_ptr.dtype.element_ty), mask=mask)
    tl.store(p_out + K, (b_x - high).to(values_ptr.dtype.element_ty), mask=mask)
    tl.store(scales_ptr + i_r, scale)


def launch_split_rows(x: Tensor) -> SplitRows:
    """[R, K] of any float type."""
    R, K = x.shape
    if x.stride(1) != 1:
        raise ValueError(f"x: rows must be contiguous, strides are {x.stride()}")
    values = torch.empty(R, 2, K, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(R, dtype=torch.float32, device=x.device)
    _split_rows_kernel[(R,)](
        x_ptr=x,
        values_ptr=values,
        scales_ptr=scales,
        K=K,
        x_stride=x.stride(0),
        LARGEST=E4M3_MAX,
        LEAST=LEAST,
        BLOCK=triton.next_power_of_2(K),
        num_warps=4 if K <= 4096 else 8,
        **dependent(x),
    )
    return SplitRows(values, scales)
