"""Absorb the key up-projection and rotate queries on a card, in one launch. Called by mla_query."""

import torch
import triton
import triton.language as tl
from torch import Tensor


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
):
    i_c = tl.program_id(0)
    i_h = tl.program_id(1)
    H = tl.num_programs(1)
    o_t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    rows = (o_t < T)[:, None]
    o_c = i_c * BLOCK_C + tl.arange(0, BLOCK_C)
    p_q = q_ptr + (o_t.to(tl.int64) * q_stride_t)[:, None] + i_h * q_stride_h
    p_out = out_ptr + (o_t.to(tl.int64) * H + i_h)[:, None] * (C + R)
    dtype = q_ptr.dtype.element_ty
    acc = tl.zeros([BLOCK_T, BLOCK_C], tl.float32)
    for n in tl.static_range(0, N, BLOCK_N):
        o_n = n + tl.arange(0, BLOCK_N)
        b_q = tl.load(p_q + o_n[None, :], mask=rows, other=0.0)
        b_up = tl.load(key_up_ptr + (i_h * N + o_n)[:, None] * C + o_c[None, :])
        acc = tl.dot(b_q, b_up, acc, input_precision="ieee")
    tl.store(p_out + o_c[None, :], acc.to(dtype), mask=rows)

    if i_c == 0:
        o_pair = tl.arange(0, R // 2)
        if INTERLEAVED:
            o_a = 2 * o_pair
            o_b = 2 * o_pair + 1
        else:
            o_a = o_pair
            o_b = o_pair + R // 2
        a = tl.load(p_q + N + o_a[None, :], mask=rows, other=0.0).to(tl.float32)
        b = tl.load(p_q + N + o_b[None, :], mask=rows, other=0.0).to(tl.float32)
        p_rotation = rotation_ptr + (o_t.to(tl.int64) * R)[:, None] + 2 * o_pair[None, :]
        cos = tl.load(p_rotation, mask=rows, other=0.0)
        sin = tl.load(p_rotation + 1, mask=rows, other=0.0)
        tl.store(p_out + C + o_a[None, :], (a * cos - b * sin).to(dtype), mask=rows)
        tl.store(p_out + C + o_b[None, :], (b * cos + a * sin).to(dtype), mask=rows)


def launch_mla_query(q: Tensor, key_up: Tensor, rotation: Tensor, interleaved: bool) -> Tensor:
    """See mla_query."""
    tokens, heads, width = q.shape
    nope, rank = key_up.shape[1:]
    turning = width - nope
    if q.stride(2) != 1 or not key_up.is_contiguous() or q.dtype != key_up.dtype:
        raise ValueError(f"q {q.dtype} {q.stride()}, key_up {key_up.dtype} {key_up.stride()}")
    if nope % 16 or rank % 16 or turning & (turning - 1):
        raise ValueError(f"no tiles for {nope} + {turning} numbers of a head and a latent of {rank}")
    out = torch.empty(tokens, heads, rank + turning, dtype=q.dtype, device=q.device)
    block_t = max(16, min(64, triton.next_power_of_2(tokens)))
    block_n = _divisor(nope, 32 if q.dtype is torch.float32 else 128)
    block_c = _divisor(rank, 64)
    _mla_query_kernel[(rank // block_c, heads, triton.cdiv(tokens, block_t))](
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
        BLOCK_N=block_n,
        BLOCK_C=block_c,
        INTERLEAVED=interleaved,
        num_warps=4,
    )
    return out


def _divisor(size: int, largest: int) -> int:
    """The largest power of two that divides `size`, up to `largest`."""
    return min(size & -size, largest)
