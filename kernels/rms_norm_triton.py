"""RMS norm on a card: one program a row, with or without the residual addition. Called by rms_norm."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dependent_launch import dependent, wait_and_release


@triton.jit
def _rms_norm_kernel(
    x_ptr,  # [T, D]
    residual_ptr,  # [T, D], updated where ADD
    gain_ptr,  # [D]
    out_ptr,  # [T, D]
    x_stride,
    residual_stride,
    D,
    eps,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_and_release(PDL)
    i_t = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    mask = offs < D
    b_x = tl.load(x_ptr + i_t * x_stride + offs, mask=mask, other=0.0)
    b_gain = tl.load(gain_ptr + offs, mask=mask, other=0.0)
    if ADD:
        p_residual = residual_ptr + i_t * residual_stride + offs
        b_residual = tl.load(p_residual, mask=mask, other=0.0)
        b_x = (b_x.to(tl.float32) + b_residual.to(tl.float32)).to(b_x.dtype)
        tl.store(p_residual, b_x, mask=mask)
    wide = b_x.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / D + eps)
    # Rounded before the gain, as the reference does.
    normed = (wide * inverse).to(b_x.dtype).to(tl.float32) * b_gain.to(tl.float32)
    tl.store(out_ptr + i_t * D + offs, normed.to(b_x.dtype), mask=mask)


def launch_rms_norm(x: Tensor, residual: Tensor | None, gain: Tensor, eps: float) -> Tensor:
    """The norm of `x`, or of `residual` after `residual += x`.

    Args:
        x: [..., D], rows of contiguous numbers.
        residual: [T, D], updated; None = none.
        gain: [D].

    Returns:
        [..., D], new and contiguous.
    """
    D = x.shape[-1]
    rows = x.reshape(-1, D)
    if rows.stride(1) != 1:
        raise ValueError(f"x: rows must be contiguous, strides are {x.stride()}")
    if residual is not None and (residual.shape != rows.shape or residual.stride(1) != 1):
        raise ValueError(
            f"residual: {tuple(residual.shape)}, expected {tuple(rows.shape)} in contiguous rows"
        )
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(D)
    _rms_norm_kernel[(rows.shape[0],)](
        x_ptr=rows,
        residual_ptr=residual,
        gain_ptr=gain,
        out_ptr=out,
        x_stride=rows.stride(0),
        residual_stride=0 if residual is None else residual.stride(0),
        D=D,
        eps=eps,
        BLOCK=block,
        ADD=residual is not None,
        num_warps=min(max(block // 512, 1), 16),
        **dependent(x),
    )
    return out
