"""Split, norm, rotate and store a fused QKV projection on a card, in one launch. Called by qk_norm_rope_kv_write."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dependent_launch import dependent, wait_and_release
from headrace.kernels.rms_norm import NormWeight

_HEADS_PER_PROGRAM = 8


@triton.jit
def _qk_norm_rope_kv_write_kernel(
    qkv_ptr,  # [T, HQ + 2 HKV, D]
    q_gain_ptr,  # [D]
    k_gain_ptr,  # [D]
    rotation_ptr,  # [T, D / 2, 2] float32
    slots_ptr,  # [T] int64
    keys_ptr,  # [slots, HKV, D]
    values_ptr,
    out_ptr,  # [T, HQ, D]
    qkv_stride,
    eps,
    HQ: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_and_release(PDL)
    i_t = tl.program_id(0).to(tl.int64)
    HALF: tl.constexpr = D // 2
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    here = (head < HQ + 2 * HKV)[:, None]
    is_q = (head < HQ)[:, None]
    is_k = (head >= HQ)[:, None] & (head < HQ + HKV)[:, None]
    is_v = (head >= HQ + HKV)[:, None] & here
    o_pair = tl.arange(0, HALF)
    if INTERLEAVED:
        o_a = 2 * o_pair
        o_b = 2 * o_pair + 1
    else:
        o_a = o_pair
        o_b = o_pair + HALF
    p_in = qkv_ptr + i_t * qkv_stride + head[:, None] * D
    b_a = tl.load(p_in + o_a[None, :], mask=here, other=0.0)
    b_b = tl.load(p_in + o_b[None, :], mask=here, other=0.0)
    cos = tl.load(rotation_ptr + i_t * D + 2 * o_pair)[None, :]
    sin = tl.load(rotation_ptr + i_t * D + 2 * o_pair + 1)[None, :]
    dtype = qkv_ptr.dtype.element_ty

    wide_a = b_a.to(tl.float32)
    wide_b = b_b.to(tl.float32)
    mean = (tl.sum(wide_a * wide_a, 1) + tl.sum(wide_b * wide_b, 1)) / D
    inverse = (1.0 / tl.sqrt(mean + eps))[:, None]
    gain_a = tl.where(is_q, tl.load(q_gain_ptr + o_a)[None, :], tl.load(k_gain_ptr + o_a)[None, :])
    gain_b = tl.where(is_q, tl.load(q_gain_ptr + o_b)[None, :], tl.load(k_gain_ptr + o_b)[None, :])
    # Rounded where the reference rounds: after the norm, after the gain, after the rotation.
    a = ((wide_a * inverse).to(dtype).to(tl.float32) * gain_a.to(tl.float32)).to(dtype).to(tl.float32)
    b = ((wide_b * inverse).to(dtype).to(tl.float32) * gain_b.to(tl.float32)).to(dtype).to(tl.float32)
    turned_a = (a * cos - b * sin).to(dtype)
    turned_b = (b * cos + a * sin).to(dtype)

    p_out = out_ptr + i_t * (HQ * D) + head[:, None] * D
    tl.store(p_out + o_a[None, :], turned_a, mask=is_q)
    tl.store(p_out + o_b[None, :], turned_b, mask=is_q)
    slot = tl.load(slots_ptr + i_t) * (HKV * D)
    p_key = keys_ptr + slot + (head[:, None] - HQ) * D
    tl.store(p_key + o_a[None, :], turned_a, mask=is_k)
    tl.store(p_key + o_b[None, :], turned_b, mask=is_k)
    p_value = values_ptr + slot + (head[:, None] - HQ - HKV) * D
    tl.store(p_value + o_a[None, :], b_a, mask=is_v)
    tl.store(p_value + o_b[None, :], b_b, mask=is_v)


def launch_qk_norm_rope_kv_write(
    qkv: Tensor,
    q_norm: NormWeight,
    k_norm: NormWeight,
    rotation: Tensor,
    slots: Tensor,
    cache: Tensor,
    interleaved: bool,
) -> Tensor:
    """See qk_norm_rope_kv_write."""
    tokens, width = qkv.shape
    heads, dim = cache.shape[3:]
    num_q = width // dim - 2 * heads
    if qkv.stride(1) != 1 or not cache[0].is_contiguous():
        raise ValueError(f"rows must be contiguous: qkv strides {qkv.stride()}, cache {cache.stride()}")
    if qkv.dtype != cache.dtype or dim & (dim - 1):
        raise ValueError(f"qkv {qkv.dtype}, cache {cache.dtype}, head dimension {dim}")
    out = torch.empty(tokens, num_q, dim, dtype=qkv.dtype, device=qkv.device)
    _qk_norm_rope_kv_write_kernel[(tokens, triton.cdiv(num_q + 2 * heads, _HEADS_PER_PROGRAM))](
        qkv_ptr=qkv,
        q_gain_ptr=q_norm.gain,
        k_gain_ptr=k_norm.gain,
        rotation_ptr=torch.view_as_real(rotation),
        slots_ptr=slots,
        keys_ptr=cache[0],
        values_ptr=cache[1],
        out_ptr=out,
        qkv_stride=qkv.stride(0),
        eps=q_norm.eps,
        HQ=num_q,
        HKV=heads,
        D=dim,
        HEADS=_HEADS_PER_PROGRAM,
        INTERLEAVED=interleaved,
        num_warps=4,
        **dependent(qkv),
    )
    return out
