"""Norm, rotate and store latents and rotary keys on a card, in one launch. Called by mla_kv_write."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dependent_launch import dependent, wait_and_release
from headrace.kernels.rms_norm import NormWeight


@triton.jit
def _mla_kv_write_kernel(
    kv_ptr,  # [T, C + R]
    gain_ptr,  # [C]
    rotation_ptr,  # [T, R / 2, 2] float32
    slots_ptr,  # [T] int64
    cache_ptr,  # [slots, C + R]
    kv_stride,
    eps,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_and_release(PDL)
    i_t = tl.program_id(0).to(tl.int64)
    p_in = kv_ptr + i_t * kv_stride
    p_out = cache_ptr + tl.load(slots_ptr + i_t) * (C + R)
    dtype = kv_ptr.dtype.element_ty
    o_c = tl.arange(0, BLOCK_C)
    wide = tl.load(p_in + o_c, mask=o_c < C, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / C + eps)
    # Rounded before the gain, as the reference does.
    b_gain = tl.load(gain_ptr + o_c, mask=o_c < C, other=0.0).to(tl.float32)
    tl.store(p_out + o_c, ((wide * inverse).to(dtype).to(tl.float32) * b_gain).to(dtype), mask=o_c < C)

    o_pair = tl.arange(0, BLOCK_PAIRS)
    pairs = o_pair < R // 2
    if INTERLEAVED:
        o_a = C + 2 * o_pair
        o_b = C + 2 * o_pair + 1
    else:
        o_a = C + o_pair
        o_b = C + o_pair + R // 2
    a = tl.load(p_in + o_a, mask=pairs, other=0.0).to(tl.float32)
    b = tl.load(p_in + o_b, mask=pairs, other=0.0).to(tl.float32)
    cos = tl.load(rotation_ptr + i_t * R + 2 * o_pair, mask=pairs, other=0.0)
    sin = tl.load(rotation_ptr + i_t * R + 2 * o_pair + 1, mask=pairs, other=0.0)
    tl.store(p_out + o_a, (a * cos - b * sin).to(dtype), mask=pairs)
    tl.store(p_out + o_b, (b * cos + a * sin).to(dtype), mask=pairs)


def launch_mla_kv_write(
    kv_a: Tensor,
    norm: NormWeight,
    rotation: Tensor,
    slots: Tensor,
    cache: Tensor,
    interleaved: bool,
) -> None:
    """See mla_kv_write."""
    tokens, width = kv_a.shape
    rank = norm.gain.shape[0]
    if kv_a.stride(1) != 1 or not cache.is_contiguous():
        raise ValueError(f"rows must be contiguous: kv_a strides {kv_a.stride()}, cache {cache.stride()}")
    if kv_a.dtype != cache.dtype:
        raise ValueError(f"kv_a {kv_a.dtype}, cache {cache.dtype}")
    _mla_kv_write_kernel[(tokens,)](
        kv_ptr=kv_a,
        gain_ptr=norm.gain,
        rotation_ptr=torch.view_as_real(rotation),
        slots_ptr=slots,
        cache_ptr=cache,
        kv_stride=kv_a.stride(0),
        eps=norm.eps,
        C=rank,
        R=width - rank,
        BLOCK_C=triton.next_power_of_2(rank),
        BLOCK_PAIRS=triton.next_power_of_2((width - rank) // 2),
        INTERLEAVED=interleaved,
        num_warps=2,
        **dependent(kv_a),
    )
