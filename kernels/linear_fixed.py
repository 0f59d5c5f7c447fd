"""Matrix products on a card whose sums do not depend on how many rows there are: one tile shape, no division of K.

The order in which a row's products are summed is that of K, in steps of one size, whoever its neighbours are.
Called by fixed.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.fp8_block import Fp8Weight
from headrace.kernels.fp8_tiles import Fp8Tuning, launch_fp8_tiles, launch_quantize_rows

FP8_TUNING = Fp8Tuning(64, 128, 4, 4)


@dataclass(frozen=True, slots=True)
class FixedTuning:
    """Launch choices that move no bit of the result: who computes which tile, and how far ahead it reads."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@triton.jit(do_not_specialize=["M"])
def _linear_fixed_kernel(
    x_ptr,  # [M, H, K]
    w_ptr,  # [H, N, K]
    out_ptr,  # [M, H, N]; added to where ADD
    M,
    N,
    K,
    x_stride_m,
    x_stride_h,
    w_stride_h,
    w_stride_n,
    w_stride_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    ADD: tl.constexpr,
):
    # GROUP tiles of rows take turns on a block of the weight, so that the cache holds both.
    m_tiles = tl.cdiv(M, BLOCK_M)
    n_tiles = tl.cdiv(N, BLOCK_N)
    i = tl.program_id(0)
    first = i // (GROUP * n_tiles) * GROUP
    size = tl.minimum(m_tiles - first, GROUP)
    within = i % (GROUP * n_tiles)
    offs_m = (first + within % size) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = within // size * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    m_mask = (offs_m < M)[:, None]
    n_mask = (offs_n < N)[None, :]
    i_h = tl.program_id(1).to(tl.int64)
    p_x = x_ptr + i_h * x_stride_h + offs_m.to(tl.int64)[:, None] * x_stride_m + offs_k[None, :]
    p_w = w_ptr + i_h * w_stride_h + offs_n.to(tl.int64)[None, :] * w_stride_n
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k_mask = offs_k < K - k
        b_x = tl.load(p_x + k, mask=m_mask & k_mask[None, :], other=0.0)
        b_w = tl.load(p_w + ((k + offs_k) * w_stride_k)[:, None], mask=n_mask & k_mask[:, None], other=0.0)
        acc = tl.dot(b_x, b_w, acc, input_precision="ieee")
    p_out = out_ptr + (offs_m.to(tl.int64) * tl.num_programs(1) + i_h)[:, None] * N + offs_n[None, :]
    if ADD:
        acc += tl.load(p_out, mask=m_mask & n_mask, other=0.0).to(tl.float32)
    tl.store(p_out, acc.to(out_ptr.dtype.element_ty), mask=m_mask & n_mask)


def launch_linear_fixed(
    x: Tensor, weight: Tensor | Fp8Weight, add_to: Tensor | None, tuning: FixedTuning | None = None
) -> Tensor:
    """linear(x), each row as if it were alone.

    Args:
        x: [M, K], rows of contiguous numbers.
        weight: [N, K], rows of contiguous numbers.
        add_to: [M, N], contiguous; updated and returned. None = a new tensor.
        tuning: None = the table's.

    Returns:
        [M, N] in x's dtype.
    """
    if isinstance(weight, Fp8Weight):
        out = launch_fp8_tiles(launch_quantize_rows(x), weight, x.dtype, tuning=FP8_TUNING)
        return out if add_to is None else add_to.add_(out)
    (M, K), N = x.shape, weight.shape[0]
    if weight.shape != (N, K) or weight.stride(1) != 1 or x.stride(1) != 1:
        raise ValueError(f"weight: {tuple(weight.shape)}, strides {weight.stride()}; x is {tuple(x.shape)}")
    if add_to is not None and (add_to.shape != (M, N) or not add_to.is_contiguous()):
        raise ValueError(f"add_to: {tuple(add_to.shape)}, strides {add_to.stride()}; expected {(M, N)}")
    out = torch.empty(M, N, dtype=x.dtype, device=x.device) if add_to is None else add_to
    _launch(x.unsqueeze(1), weight.unsqueeze(0), out, tuning, add=add_to is not None)
    return out


def launch_heads_fixed(x: Tensor, weight: Tensor) -> Tensor:
    """A product for each head: [T, H, K] with the last dimension contiguous, [H, K, N] -> [T, H, N]."""
    if x.shape[1:] != weight.shape[:2] or x.stride(2) != 1:
        raise ValueError(f"x: {tuple(x.shape)}, strides {x.stride()}; weight is {tuple(weight.shape)}")
    out = torch.empty(x.shape[0], x.shape[1], weight.shape[2], dtype=x.dtype, device=x.device)
    _launch(x, weight.transpose(1, 2), out, None, add=False)
    return out


def _launch(x: Tensor, weight: Tensor, out: Tensor, tuning: FixedTuning | None, *, add: bool) -> None:
    """[M, H, K], [H, N, K] -> `out` [M, H, N]."""
    (M, H, K), N = x.shape, weight.shape[1]
    tuning = fixed_tuning(M, N, x.dtype) if tuning is None else tuning
    _linear_fixed_kernel[(triton.cdiv(M, tuning.block_m) * triton.cdiv(N, tuning.block_n), H)](
        x_ptr=x,
        w_ptr=weight,
        out_ptr=out,
        M=M,
        N=N,
        K=K,
        x_stride_m=x.stride(0),
        x_stride_h=x.stride(1),
        w_stride_h=weight.stride(0),
        w_stride_n=weight.stride(1),
        w_stride_k=weight.stride(2),
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        BLOCK_K=tuning.block_k,
        STAGES=tuning.num_stages,
        GROUP=8,
        ADD=add,
        num_warps=tuning.num_warps,
    )


def fixed_tuning(M: int, N: int, dtype: torch.dtype) -> FixedTuning:
    """Narrow tiles for few rows, so that many programs read the weight. Whatever the tile, an output is the sum of
    its products 16 by 16 in the order of K; tests compare the bits of all of these."""
    if dtype is torch.float32:
        return FixedTuning(block_m=64, block_n=32, block_k=32, num_warps=4, num_stages=3)
    wide = N > 16384
    if M <= 16:
        return FixedTuning(16, 64 if wide else 32, 128, 4, 4)
    if M <= 64:
        return FixedTuning(64, 64, 64, 4, 4) if wide else FixedTuning(64, 32, 128, 4, 4)
    if M <= 512 and not wide:
        return FixedTuning(64, 64, 64, 4, 4)
    return FixedTuning(128, 256 if wide else 128, 64, 8, 4)
