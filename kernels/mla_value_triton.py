"""Bring attention outputs from the latent space to the heads' values on a card. Called by mla_value."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dependent_launch import dependent, wait_and_release


@triton.jit(do_not_specialize=["T"])
def _mla_value_kernel(
    latent_ptr,  # [T, H, C]
    value_up_ptr,  # [H, C, V]
    out_ptr,  # [T, H, V]
    T,
    C: tl.constexpr,
    V: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
    PDL: tl.constexpr,
):
    i_v = tl.program_id(0)
    i_h = tl.program_id(1)
    H = tl.num_programs(1)
    o_t = tl.program_id(2) * BLOCK_T + tl.arange(0, BLOCK_T)
    rows = (o_t < T)[:, None]
    o_v = i_v * BLOCK_V + tl.arange(0, BLOCK_V)
    o_c = tl.arange(0, BLOCK_C)
    columns = (o_v < V)[None, :]
    # The weight depends on no launch: it is under way before the wait.
    ups = ()  # type: tuple[tl.tensor, ...]
    for c in tl.static_range(0, C, BLOCK_C):
        p_up = value_up_ptr + (i_h * C + c + o_c)[:, None] * V + o_v[None, :]
        ups = ups + (tl.load(p_up, mask=(c + o_c < C)[:, None] & columns, other=0.0),)
    wait_and_release(PDL)
    head_at = (o_t.to(tl.int64) * H + i_h)[:, None]
    acc = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
    for i in tl.static_range(len(ups)):
        o_latent = (i * BLOCK_C + o_c)[None, :]
        b_latent = tl.load(latent_ptr + head_at * C + o_latent, mask=rows & (o_latent < C), other=0.0)
        acc = tl.dot(b_latent, ups[i], acc, input_precision="ieee")
    tl.store(out_ptr + head_at * V + o_v[None, :], acc.to(out_ptr.dtype.element_ty), mask=rows & columns)


def launch_mla_value(latent: Tensor, value_up: Tensor) -> Tensor:
    """See mla_value."""
    tokens, heads, rank = latent.shape
    width = value_up.shape[2]
    if not latent.is_contiguous() or not value_up.is_contiguous() or latent.dtype != value_up.dtype:
        raise ValueError(
            f"latent {latent.dtype} {latent.stride()}, value_up {value_up.dtype} {value_up.stride()}"
        )
    out = torch.empty(tokens, heads * width, dtype=latent.dtype, device=latent.device)
    wide = latent.dtype is torch.float32
    block_t = max(16, min(32 if wide else 64, triton.next_power_of_2(tokens)))
    block_v = max(16, min(triton.next_power_of_2(width), 16 if wide else 32))
    _mla_value_kernel[(triton.cdiv(width, block_v), heads, triton.cdiv(tokens, block_t))](
        latent_ptr=latent,
        value_up_ptr=value_up,
        out_ptr=out,
        T=tokens,
        C=rank,
        V=width,
        BLOCK_T=block_t,
        BLOCK_C=min(32 if wide else 128, max(16, triton.next_power_of_2(rank))),
        BLOCK_V=block_v,
        num_warps=4,
        **dependent(latent),
    )
    return out
