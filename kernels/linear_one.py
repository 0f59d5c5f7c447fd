"""Products of one token with a weight, on a card: the weight is streamed once, each program owns some rows.

What a program reads of the weight first is asked for before the launch ahead has ended (programmatic dependent
launch), since weights depend on no launch. fp8 weights: kernels/linear_one_fp8.py. Called by linear.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dependent_launch import dependent, wait_and_release
from headrace.kernels.rms_norm import NormWeight

_MAX_BLOCK_K = 1024


@dataclass(frozen=True, slots=True)
class OneTuning:
    """Launch choices: a program takes `block_n` rows of the weight, `block_k` numbers of each at a time."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


@triton.jit
def _linear_one_kernel(
    x_ptr,  # [K]
    gain_ptr,  # [K] where NORM
    w_ptr,  # [N, K]
    out_ptr,  # [N]; added to where ADD
    N,
    K,
    eps,
    w_stride,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    i_n = tl.program_id(0)
    offs_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    n_mask = offs_n < N
    p_w = w_ptr + offs_n.to(tl.int64)[:, None] * w_stride + offs_k[None, :]
    b_w = tl.load(p_w, mask=n_mask[:, None] & (offs_k < K)[None, :], other=0.0)
    wait_and_release(PDL)
    b_x = tl.load(x_ptr + offs_k, mask=offs_k < K, other=0.0).to(tl.float32)
    # Every program reads the whole token: the norm's divisor costs it no load, and its sums are divided at the end.
    squares = b_x * b_x
    if NORM:
        b_x *= tl.load(gain_ptr + offs_k, mask=offs_k < K, other=0.0).to(tl.float32)
    acc = b_w.to(tl.float32) * b_x[None, :]
    for k in tl.range(BLOCK_K, K, BLOCK_K, num_stages=STAGES):
        k_mask = offs_k < K - k
        b_w = tl.load(p_w + k, mask=n_mask[:, None] & k_mask[None, :], other=0.0)
        b_x = tl.load(x_ptr + k + offs_k, mask=k_mask, other=0.0).to(tl.float32)
        if NORM:
            squares += b_x * b_x
            b_x *= tl.load(gain_ptr + k + offs_k, mask=k_mask, other=0.0).to(tl.float32)
        acc += b_w.to(tl.float32) * b_x[None, :]
    out = tl.sum(acc, 1)
    if NORM:
        out /= tl.sqrt(tl.sum(squares, 0) / K + eps)
    if ADD:
        out += tl.load(out_ptr + offs_n, mask=n_mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs_n, out.to(out_ptr.dtype.element_ty), mask=n_mask)


def launch_linear_one(
    x: Tensor,
    weight: Tensor,
    add_to: Tensor | None,
    tuning: OneTuning | None = None,
    norm: NormWeight | None = None,
) -> Tensor:
    """linear(x), or linear(rms_norm(x)), for one token; into `add_to`, added, where given.

    Args:
        x: [1, K], contiguous.
        weight: [N, K], rows of contiguous numbers.
        add_to: [1, N], updated and returned; None = a new tensor.
        tuning: None = the table's.
        norm: of K numbers; None = none.

    Returns:
        [1, N] in x's dtype.
    """
    N, K = weight.shape
    if x.shape != (1, K) or weight.stride(1) != 1 or x.stride(1) != 1:
        raise ValueError(f"weight: {tuple(weight.shape)}, strides {weight.stride()}; x is {tuple(x.shape)}")
    tuning = one_tuning(K) if tuning is None else tuning
    out = torch.empty(1, N, dtype=x.dtype, device=x.device) if add_to is None else add_to
    _linear_one_kernel[(triton.cdiv(N, tuning.block_n),)](
        x_ptr=x,
        gain_ptr=None if norm is None else norm.gain,
        w_ptr=weight,
        out_ptr=out,
        N=N,
        K=K,
        eps=0.0 if norm is None else norm.eps,
        w_stride=weight.stride(0),
        BLOCK_N=tuning.block_n,
        BLOCK_K=tuning.block_k,
        STAGES=tuning.num_stages,
        NORM=norm is not None,
        ADD=add_to is not None,
        num_warps=tuning.num_warps,
        **dependent(x),
    )
    return out


def one_tuning(K: int) -> OneTuning:
    """Little in registers, so that many programs ask for their rows at once."""
    block_k = min(max(triton.next_power_of_2(K), 128), _MAX_BLOCK_K)
    return OneTuning(block_n=4, block_k=block_k, num_warps=4, num_stages=3)
