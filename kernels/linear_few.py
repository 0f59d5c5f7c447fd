"""Products of a few tokens with a weight, on a card: the weight is streamed once, each program owns some of its rows.

A program's part of the weight is asked for before the launch ahead has ended, as linear_one's is. The weight's rows
come first in the product: they fill a tensor core's tile, which so few tokens would not. Called by linear.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.ahead import ask_for
from headrace.kernels.dependent_launch import dependent, wait_and_release

FEW_TOKENS = 1  # up to which it beats the vendor's product
_BLOCK_T = 16  # tokens that each program reads all of
MAX_ROWS = 8192  # of a weight: the larger stream as fast by the vendor's product


@dataclass(frozen=True, slots=True)
class FewTuning:
    """Launch choices: a program takes `block_n` rows of the weight, `block_k` numbers of each at a time."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@triton.jit(do_not_specialize=["T"])
def _linear_few_kernel(
    x_ptr,  # [T, K]
    w_ptr,  # [N, K]
    out_ptr,  # [T, N]; added to where ADD
    T,
    N,
    K,
    x_stride,
    w_stride,
    out_stride,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    LINES: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    o_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_t = tl.arange(0, BLOCK_T)
    o_k = tl.arange(0, BLOCK_K)
    n_mask = (o_n < N)[:, None]
    t_mask = (o_t < T)[None, :]
    p_w = w_ptr + o_n.to(tl.int64)[:, None] * w_stride
    if PDL:
        # A line holds 64 numbers of two bytes.
        o_line = 64 * tl.arange(0, LINES)
        ask_for(p_w + o_line[None, :], n_mask & (o_line < K)[None, :])
    wait_and_release(PDL)
    p_x = x_ptr + o_t[None, :] * x_stride
    acc = tl.zeros([BLOCK_N, BLOCK_T], tl.float32)
    for k in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        k_mask = o_k < K - k
        b_w = tl.load(p_w + k + o_k[None, :], mask=n_mask & k_mask[None, :], other=0.0)
        b_x = tl.load(p_x + k + o_k[:, None], mask=t_mask & k_mask[:, None], other=0.0)
        acc = tl.dot(b_w, b_x, acc, input_precision="ieee")
    p_out = out_ptr + o_t.to(tl.int64)[None, :] * out_stride + o_n[:, None]
    if ADD:
        acc += tl.load(p_out, mask=n_mask & t_mask, other=0.0).to(tl.float32)
    tl.store(p_out, acc.to(out_ptr.dtype.element_ty), mask=n_mask & t_mask)


def takes_few(x: Tensor, weight: Tensor) -> bool:
    """Whether the launch below is for this product."""
    return 1 < x.shape[0] <= FEW_TOKENS and weight.shape[0] <= MAX_ROWS and x.element_size() == 2


def launch_linear_few(
    x: Tensor, weight: Tensor, add_to: Tensor | None, tuning: FewTuning | None = None
) -> Tensor:
    """linear(x); into `add_to`, added, where given.

    Args:
        x: [T, K] of at most 16 tokens.
        weight: [N, K], rows of contiguous numbers.
        add_to: [T, N], updated and returned; None = a new tensor.
        tuning: None = the table's.

    Returns:
        [T, N] in x's dtype.
    """
    (T, K), N = x.shape, weight.shape[0]
    if T > _BLOCK_T or weight.stride(1) != 1 or x.stride(1) != 1:
        raise ValueError(f"x: {tuple(x.shape)} {x.stride()}, weight: strides {weight.stride()}")
    tuning = few_tuning(N) if tuning is None else tuning
    out = torch.empty(T, N, dtype=x.dtype, device=x.device) if add_to is None else add_to
    _linear_few_kernel[(triton.cdiv(N, tuning.block_n),)](
        x_ptr=x,
        w_ptr=weight,
        out_ptr=out,
        T=T,
        N=N,
        K=K,
        x_stride=x.stride(0),
        w_stride=weight.stride(0),
        out_stride=out.stride(0),
        BLOCK_T=_BLOCK_T,
        BLOCK_N=tuning.block_n,
        BLOCK_K=tuning.block_k,
        STAGES=tuning.num_stages,
        LINES=triton.next_power_of_2(triton.cdiv(K, 64)),
        ADD=add_to is not None,
        num_warps=tuning.num_warps,
        **dependent(x),
    )
    return out


def few_tuning(N: int) -> FewTuning:
    """Enough programs for every multiprocessor."""
    return FewTuning(block_n=16 if N < 4096 else 32, block_k=256, num_warps=4, num_stages=5)
