"""Absorb the key up-projection and rotate queries on a card, in one launch. Called by mla_query."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dependent_launch import dependent, wait_and_release


@triton.jit
def turn(x, cos_sin, T: tl.constexpr, R: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rotate [T, R] float32 by [T, R] of cosines and sines in turn; the order of the numbers is kept."""
    cos, sin = tl.split(tl.reshape(cos_sin, (T, R // 2, 2)))
    if INTERLEAVED:
        a, b = tl.split(tl.reshape(x, (T, R // 2, 2)))
        turned = tl.join(a * cos - b * sin, b * cos + a * sin)
    else:
        a, b = tl.split(tl.permute(tl.reshape(x, (T, 2, R // 2)), (0, 2, 1)))
        turned = tl.permute(tl.join(a * cos - b * sin, b * cos + a * sin), (0, 2, 1))
    return tl.reshape(turned, (T, R))


@triton.jit(do_not_specialize=["T"])
def _mla_query_kernel(
    q_ptr,  # [T, H, N + R]
    key_up_ptr,  # [H, N, C]
    rotation_ptr,  # [T, R / 2, 2] float32
    out_ptr,  # [T, H, C + R]
    T,
    q_stride_t,
    q_stride_h,
    N: tl.constexpr,
    R: tl.constexpr,
    C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    i_c = tl.program_id(0)
    i_h = tl.program_id(1)
    o_t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    rows = (o_t < T)[:, None]
    p_q = q_ptr + (o_t.to(tl.int64) * q_stride_t)[:, None] + i_h * q_stride_h
    p_out = out_ptr + (o_t.to(tl.int64) * tl.num_programs(1) + i_h)[:, None] * (C + R)
    # The last program of a head rotates; the others each make some columns of the product.
    if i_c == tl.num_programs(0) - 1:
        wait_and_release(PDL)
        o_r = tl.arange(0, R)[None, :]
        b_turning = tl.load(p_q + N + o_r, mask=rows, other=0.0).to(tl.float32)
        p_rotation = rotation_ptr + (o_t.to(tl.int64) * R)[:, None] + o_r
        turned = turn(b_turning, tl.load(p_rotation, mask=rows, other=0.0), BLOCK_T, R, INTERLEAVED)
        tl.store(p_out + C + o_r, turned.to(out_ptr.dtype.element_ty), mask=rows)
    else:
        o_c = i_c * BLOCK_C + tl.arange(0, BLOCK_C)
        o_n = tl.arange(0, BLOCK_N)
        columns = (o_c < C)[None, :]
        p_up = key_up_ptr + (i_h * N + o_n)[:, None] * C + o_c[None, :]
        b_up = tl.load(p_up, mask=(o_n < N)[:, None] & columns, other=0.0)
        wait_and_release(PDL)
        b_q = tl.load(p_q + o_n[None, :], mask=rows & (o_n < N)[None, :], other=0.0)
        out = tl.dot(b_q, b_up, input_precision="ieee")
        tl.store(p_out + o_c[None, :], out.to(out_ptr.dtype.element_ty), mask=rows & columns)


def launch_mla_query(q: Tensor, key_up: Tensor, rotation: Tensor, interleaved: bool) -> Tensor:
    """See mla_query."""
    tokens, heads, width = q.shape
    nope, rank = key_up.shape[1:]
    turning = width - nope
    if q.stride(2) != 1 or not key_up.is_contiguous() or q.dtype != key_up.dtype:
        raise ValueError(f"q {q.dtype} {q.stride()}, key_up {key_up.dtype} {key_up.stride()}")
    if turning & (turning - 1):
        raise ValueError(f"{turning} rotary dimensions are no power of two")
    out = torch.empty(tokens, heads, rank + turning, dtype=q.dtype, device=q.device)
    wide = q.dtype is torch.float32
    block_t = max(16, min(32 if wide else 64, triton.next_power_of_2(tokens)))
    block_c = min(64, max(16, triton.next_power_of_2(rank)))
    _mla_query_kernel[(triton.cdiv(rank, block_c) + 1, heads, triton.cdiv(tokens, block_t))](
        q_ptr=q,
        key_up_ptr=key_up,
        rotation_ptr=torch.view_as_real(rotation),
        out_ptr=out,
        T=tokens,
        q_stride_t=q.stride(0),
        q_stride_h=q.stride(1),
        N=nope,
        R=turning,
        C=rank,
        BLOCK_T=block_t,
        BLOCK_N=max(16, triton.next_power_of_2(nope)),
        BLOCK_C=block_c,
        INTERLEAVED=interleaved,
        num_warps=4,
        **dependent(q),
    )
    return out
