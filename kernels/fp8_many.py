"""gate_up of routed experts for many tokens, fp8 times fp8, with SwiGLU into fp8 rows for down.

A program makes 128 gates and their factors from one read of its rows, since the caches limit what small tiles can
reach. Scales as in kernels/fp8_tiles.py. Called by experts on a card.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from headrace.kernels.expert_sort import ExpertOrder
from headrace.kernels.experts_tiles import tile_of
from headrace.kernels.fp8_block import BLOCK, E4M3_MAX, Fp8Weight
from headrace.kernels.fp8_tiles import LEAST, Fp8Rows
from headrace.kernels.silu_mul_triton import swiglu

_GROUP = 8


@dataclass(frozen=True, slots=True)
class ManyTuning:
    """Launch choices."""

    num_warps: int
    num_stages: int


@triton.jit
def _many_gate_up_kernel(
    x_ptr,  # [T, D]
    x_scale_ptr,  # [T, D / 128]
    w_ptr,  # [E, 2F, D]
    w_scale_ptr,  # [E, 2F / 128, D / 128]
    pairs_ptr,
    tile_experts_ptr,
    num_tiles_ptr,
    out_ptr,  # [P, F] fp8
    out_scale_ptr,  # [P, F / 128]
    P,
    TOP_K,
    D,
    F,
    w_stride,
    BLOCK_M: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
):
    num_tiles = tl.load(num_tiles_ptr)
    i_tile, i_n = tile_of(num_tiles, F // 128, GROUP)
    if i_tile < num_tiles:
        i_e = tl.load(tile_experts_ptr + i_tile).to(tl.int64)
        b_pairs = tl.load(pairs_ptr + i_tile * BLOCK_M + tl.arange(0, BLOCK_M))
        m_mask = b_pairs < P
        rows = tl.where(m_mask, b_pairs // TOP_K, 0).to(tl.int64)
        offs = tl.arange(0, 128)
        groups = D // 128
        p_x = x_ptr + rows[:, None] * D + offs[None, :]
        p_x_scale = x_scale_ptr + rows * groups
        p_gate = w_ptr + i_e * w_stride + ((i_n * 128 + offs)[None, :] * D + offs[:, None])
        p_up = p_gate + F * D
        p_gate_scale = w_scale_ptr + (i_e * (2 * F // 128) + i_n) * groups
        p_up_scale = p_gate_scale + F // 128 * groups
        gate = tl.zeros([BLOCK_M, 128], tl.float32)
        up = tl.zeros([BLOCK_M, 128], tl.float32)
        for group in tl.range(0, groups, num_stages=STAGES):
            b_x = tl.load(p_x + group * 128, mask=m_mask[:, None], other=0.0)
            w_gate = tl.load(p_gate + group * 128)
            w_up = tl.load(p_up + group * 128)
            scale = tl.load(p_x_scale + group, mask=m_mask, other=0.0)
            gate += tl.dot(b_x, w_gate) * (scale * tl.load(p_gate_scale + group))[:, None]
            up += tl.dot(b_x, w_up) * (scale * tl.load(p_up_scale + group))[:, None]
        out = swiglu(gate, up)
        scale = tl.maximum(tl.max(tl.abs(out), 1), LEAST) / LARGEST
        out = tl.minimum(tl.maximum(out / scale[:, None], -LARGEST), LARGEST)
        places = b_pairs.to(tl.int64)
        p_out = out_ptr + places[:, None] * F + (i_n * 128 + offs)[None, :]
        tl.store(p_out, out.to(out_ptr.dtype.element_ty), mask=m_mask[:, None])
        tl.store(out_scale_ptr + places * (F // 128) + i_n, scale, mask=m_mask)


def launch_many_gate_up(
    x: Fp8Rows, weight: Fp8Weight, order: ExpertOrder, top_k: int, tuning: ManyTuning
) -> Fp8Rows:
    """[T, D], [E, 2F, D] -> SwiGLU of every pair's product, [T * top_k, F]."""
    (T, D), F = x.values.shape, weight.shape[1] // 2
    if weight.shape[2] != D or D % BLOCK or F % BLOCK or not weight.values.is_contiguous():
        raise ValueError(
            f"weight: {tuple(weight.shape)}, strides {weight.values.stride()}; expected {D} contiguous, "
            f"and both halves in blocks of {BLOCK}"
        )
    P, device = T * top_k, x.values.device
    values = torch.empty(P, F, dtype=x.values.dtype, device=device)
    scales = torch.empty(P, F // BLOCK, dtype=torch.float32, device=device)
    _many_gate_up_kernel[(order.max_tiles * (F // BLOCK),)](
        x_ptr=x.values,
        x_scale_ptr=x.scales,
        w_ptr=weight.values,
        w_scale_ptr=weight.scale_inv,
        pairs_ptr=order.pairs,
        tile_experts_ptr=order.tile_experts,
        num_tiles_ptr=order.num_tiles,
        out_ptr=values,
        out_scale_ptr=scales,
        P=P,
        TOP_K=top_k,
        D=D,
        F=F,
        w_stride=weight.values.stride(0),
        BLOCK_M=order.block,
        STAGES=tuning.num_stages,
        GROUP=_GROUP,
        LARGEST=E4M3_MAX,
        LEAST=LEAST,
        num_warps=tuning.num_warps,
    )
    return Fp8Rows(values, scales)
