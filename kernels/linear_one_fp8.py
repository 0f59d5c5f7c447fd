"""Products of one token with an fp8 weight, on a card: all that a program reads is asked for before the launch
ahead has ended (programmatic dependent launch), since weights depend on no launch.

Activations stay as they are, weights exact. Called by linear.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dependent_launch import dependent, wait_and_release
from headrace.kernels.fp8_block import BLOCK, Fp8Weight
from headrace.kernels.rms_norm import NormWeight

_MOST_GROUPS = 16  # of 128 numbers, in one piece of a row


@dataclass(frozen=True, slots=True)
class OneFp8LinearTuning:
    """Launch choices: rows of the weight that a program takes."""

    block_n: int = 4
    num_warps: int = 2


@triton.jit
def _linear_one_fp8_kernel(
    x_ptr,  # [K]
    gain_ptr,  # [K] where NORM
    w_ptr,  # [N, K]
    scale_ptr,  # [N / 128, K / 128]
    out_ptr,  # [N]; added to where ADD
    N,
    eps,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    NORM: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    i_n = tl.program_id(0)
    offs_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_g = tl.arange(0, GROUPS)
    offs_k = offs_g[:, None] * 128 + tl.arange(0, 128)[None, :]
    n_mask = offs_n < N
    groups: tl.constexpr = (K + 127) // 128
    p_w = w_ptr + offs_n.to(tl.int64)[:, None, None] * K + offs_k[None, :, :]
    p_scale = scale_ptr + i_n * BLOCK_N // 128 * groups + offs_g
    weights = ()  # type: tuple[tl.tensor, ...]
    for first in tl.static_range(0, groups, GROUPS):
        mask = n_mask[:, None, None] & (offs_k < K - first * 128)[None, :, :]
        weights = weights + (tl.load(p_w + first * 128, mask=mask, other=0.0),)
    wait_and_release(PDL)
    acc = tl.zeros([BLOCK_N], tl.float32)
    squares = 0.0
    for i in tl.static_range(len(weights)):
        k_mask = offs_k < K - i * GROUPS * 128
        b_x = tl.load(x_ptr + i * GROUPS * 128 + offs_k, mask=k_mask, other=0.0).to(tl.float32)
        if NORM:
            # Every program reads the whole token, so the norm costs no load of it; the sum is divided at the end.
            squares += tl.sum(tl.sum(b_x * b_x, 1), 0)
            b_x *= tl.load(gain_ptr + i * GROUPS * 128 + offs_k, mask=k_mask, other=0.0).to(tl.float32)
        sums = tl.sum(weights[i].to(tl.float32) * b_x[None, :, :], 2)
        scales = tl.load(p_scale + i * GROUPS, mask=offs_g < groups - i * GROUPS, other=0.0)
        acc += tl.sum(sums * scales[None, :], 1)
    if NORM:
        acc /= tl.sqrt(squares / K + eps)
    if ADD:
        acc += tl.load(out_ptr + offs_n, mask=n_mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs_n, acc.to(out_ptr.dtype.element_ty), mask=n_mask)


def launch_linear_one_fp8(
    x: Tensor,
    weight: Fp8Weight,
    add_to: Tensor | None,
    tuning: OneFp8LinearTuning | None = None,
    norm: NormWeight | None = None,
) -> Tensor:
    """linear(x), or linear(rms_norm(x)), for one token: [1, K] x [N, K] -> [1, N] in x's dtype.

    Args:
        add_to: [1, N], updated and returned; None = a new tensor.
    """
    tuning = OneFp8LinearTuning() if tuning is None else tuning
    N, K = weight.shape
    if x.shape != (1, K) or x.stride(1) != 1 or not weight.values.is_contiguous():
        raise ValueError(f"weight: {(N, K)}, strides {weight.values.stride()}; x is {tuple(x.shape)}")
    if BLOCK % tuning.block_n:
        raise ValueError(f"tuning: {tuning} crosses the {BLOCK}x{BLOCK} blocks of scales")
    out = torch.empty(1, N, dtype=x.dtype, device=x.device) if add_to is None else add_to
    _linear_one_fp8_kernel[(triton.cdiv(N, tuning.block_n),)](
        x_ptr=x,
        gain_ptr=None if norm is None else norm.gain,
        w_ptr=weight.values,
        scale_ptr=weight.scale_inv,
        out_ptr=out,
        N=N,
        eps=0.0 if norm is None else norm.eps,
        K=K,
        BLOCK_N=tuning.block_n,
        GROUPS=min(triton.next_power_of_2(triton.cdiv(K, BLOCK)), _MOST_GROUPS),
        NORM=norm is not None,
        ADD=add_to is not None,
        num_warps=tuning.num_warps,
        **dependent(x),
    )
    return out
