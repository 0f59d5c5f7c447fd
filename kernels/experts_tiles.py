"""The routed experts' products over tiles of sorted pairs: gate_up with SwiGLU, down, and the sum over a token.

A tile holds one expert's tokens; its weights are read once. Small tiles stream weights for few tokens, large
ones feed the tensor cores for many. fp8 weights: kernels/fp8_tiles.py. Called by experts on a card.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dependent_launch import dependent, wait_and_release
from headrace.kernels.expert_sort import ExpertOrder
from headrace.kernels.silu_mul_triton import swiglu


@dataclass(frozen=True, slots=True)
class TileTuning:
    """Launch choices: `block_n` outputs (of each half for gate_up), `block_k` numbers of the sum at a time."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    group: int = 8  # tiles that take turns on a block of weights, so that the cache holds both


@triton.jit
def tile_of(num_tiles, N_BLOCKS, GROUP: tl.constexpr):
    """(tile, block of outputs) of this program: groups of tiles share the blocks of weights."""
    i = tl.program_id(0)
    group = i // (GROUP * N_BLOCKS)
    first = group * GROUP
    size = tl.maximum(tl.minimum(num_tiles - first, GROUP), 1)
    within = i % (GROUP * N_BLOCKS)
    tile = tl.where(first < num_tiles, first + within % size, num_tiles)
    # The last group is smaller than its share of programs: those without work get a tile that is none.
    i_n = within // size
    return tl.where(i_n < N_BLOCKS, tile, num_tiles), i_n


@triton.jit
def _gate_up_kernel(
    x_ptr,  # [T, D]
    w_ptr,  # [E, 2F, D]
    pairs_ptr,
    tile_experts_ptr,
    num_tiles_ptr,
    out_ptr,  # [P, F]
    P,
    TOP_K,
    D,
    F,
    x_stride,
    w_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_and_release(PDL)
    num_tiles = tl.load(num_tiles_ptr)
    i_tile, i_n = tile_of(num_tiles, tl.cdiv(F, BLOCK_N), GROUP)
    if i_tile < num_tiles:
        i_e = tl.load(tile_experts_ptr + i_tile).to(tl.int64)
        b_pairs = tl.load(pairs_ptr + i_tile * BLOCK_M + tl.arange(0, BLOCK_M))
        m_mask = b_pairs < P
        offs_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
        offs_k = tl.arange(0, BLOCK_K)
        n_mask = offs_n < F
        p_x = x_ptr + (b_pairs // TOP_K).to(tl.int64)[:, None] * x_stride + offs_k[None, :]
        p_gate = w_ptr + i_e * w_stride + offs_n.to(tl.int64)[None, :] * D + offs_k[:, None]
        up = F.to(tl.int64) * D
        b_gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        b_up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, D, BLOCK_K, num_stages=STAGES):
            k_mask = offs_k < D - k
            w_mask = n_mask[None, :] & k_mask[:, None]
            b_x = tl.load(p_x + k, mask=m_mask[:, None] & k_mask[None, :], other=0.0)
            w_gate = tl.load(p_gate + k, mask=w_mask, other=0.0)
            w_up = tl.load(p_gate + up + k, mask=w_mask, other=0.0)
            b_gate = tl.dot(b_x, w_gate, b_gate, input_precision="ieee")
            b_up = tl.dot(b_x, w_up, b_up, input_precision="ieee")
        p_out = out_ptr + b_pairs.to(tl.int64)[:, None] * F + offs_n[None, :]
        out = swiglu(b_gate, b_up).to(out_ptr.dtype.element_ty)
        tl.store(p_out, out, mask=m_mask[:, None] & n_mask[None, :])


@triton.jit
def _down_kernel(
    x_ptr,  # [P, F]
    w_ptr,  # [E, D, F]
    shares_ptr,  # [P] float32
    pairs_ptr,
    tile_experts_ptr,
    num_tiles_ptr,
    out_ptr,  # [P, D]
    P,
    D,
    F,
    w_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_and_release(PDL)
    num_tiles = tl.load(num_tiles_ptr)
    i_tile, i_n = tile_of(num_tiles, tl.cdiv(D, BLOCK_N), GROUP)
    if i_tile < num_tiles:
        i_e = tl.load(tile_experts_ptr + i_tile).to(tl.int64)
        b_pairs = tl.load(pairs_ptr + i_tile * BLOCK_M + tl.arange(0, BLOCK_M))
        m_mask = b_pairs < P
        offs_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
        offs_k = tl.arange(0, BLOCK_K)
        n_mask = offs_n < D
        p_x = x_ptr + b_pairs.to(tl.int64)[:, None] * F + offs_k[None, :]
        p_w = w_ptr + i_e * w_stride + offs_n.to(tl.int64)[None, :] * F + offs_k[:, None]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, F, BLOCK_K, num_stages=STAGES):
            k_mask = offs_k < F - k
            b_x = tl.load(p_x + k, mask=m_mask[:, None] & k_mask[None, :], other=0.0)
            b_w = tl.load(p_w + k, mask=n_mask[None, :] & k_mask[:, None], other=0.0)
            acc = tl.dot(b_x, b_w, acc, input_precision="ieee")
        acc *= tl.load(shares_ptr + b_pairs, mask=m_mask, other=0.0)[:, None]
        p_out = out_ptr + b_pairs.to(tl.int64)[:, None] * D + offs_n[None, :]
        tl.store(p_out, acc.to(out_ptr.dtype.element_ty), mask=m_mask[:, None] & n_mask[None, :])


@triton.jit
def _combine_kernel(
    parts_ptr,  # [T * TOP_K, D]
    out_ptr,  # [T, D]; added to where ADD
    D,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_and_release(PDL)
    i_t = tl.program_id(0).to(tl.int64)
    offs = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < D
    acc = tl.zeros([BLOCK], tl.float32)
    if ADD:
        acc += tl.load(out_ptr + i_t * D + offs, mask=mask, other=0.0).to(tl.float32)
    for k in tl.static_range(TOP_K):
        acc += tl.load(parts_ptr + (i_t * TOP_K + k) * D + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + i_t * D + offs, acc.to(out_ptr.dtype.element_ty), mask=mask)


def launch_gate_up(x: Tensor, weight: Tensor, order: ExpertOrder, top_k: int, tuning: TileTuning) -> Tensor:
    """[T, D], [E, 2F, D] -> SwiGLU of every pair's product, [T * top_k, F]."""
    (T, D), F = x.shape, weight.shape[1] // 2
    _check(weight, D)
    out = torch.empty(T * top_k, F, dtype=x.dtype, device=x.device)
    _gate_up_kernel[(order.max_tiles * triton.cdiv(F, tuning.block_n),)](
        x_ptr=x,
        w_ptr=weight,
        pairs_ptr=order.pairs,
        tile_experts_ptr=order.tile_experts,
        num_tiles_ptr=order.num_tiles,
        out_ptr=out,
        P=T * top_k,
        TOP_K=top_k,
        D=D,
        F=F,
        x_stride=x.stride(0),
        w_stride=weight.stride(0),
        BLOCK_M=order.block,
        BLOCK_N=tuning.block_n,
        BLOCK_K=tuning.block_k,
        STAGES=tuning.num_stages,
        GROUP=tuning.group,
        num_warps=tuning.num_warps,
        **dependent(x),
    )
    return out


def launch_down(
    x: Tensor,
    weight: Tensor,
    shares: Tensor,
    order: ExpertOrder,
    dtype: torch.dtype,
    tuning: TileTuning,
) -> Tensor:
    """[P, F], [E, D, F], each pair's share [T, K] float32 -> share * product, [P, D] of `dtype`."""
    (P, F), D = x.shape, weight.shape[1]
    _check(weight, F)
    out = torch.empty(P, D, dtype=dtype, device=x.device)
    _down_kernel[(order.max_tiles * triton.cdiv(D, tuning.block_n),)](
        x_ptr=x,
        w_ptr=weight,
        shares_ptr=shares,
        pairs_ptr=order.pairs,
        tile_experts_ptr=order.tile_experts,
        num_tiles_ptr=order.num_tiles,
        out_ptr=out,
        P=P,
        D=D,
        F=F,
        w_stride=weight.stride(0),
        BLOCK_M=order.block,
        BLOCK_N=tuning.block_n,
        BLOCK_K=tuning.block_k,
        STAGES=tuning.num_stages,
        GROUP=tuning.group,
        num_warps=tuning.num_warps,
        **dependent(x),
    )
    return out


def launch_combine(parts: Tensor, top_k: int, dtype: torch.dtype, base: Tensor | None) -> Tensor:
    """[T * top_k, D] -> the sum of each token's parts, in order, [T, D] of `dtype`; added to `base` if given."""
    T, D = parts.shape[0] // top_k, parts.shape[1]
    if base is not None and not base.is_contiguous():
        raise ValueError(f"base: must be contiguous, strides are {base.stride()}")
    out = torch.empty(T, D, dtype=dtype, device=parts.device) if base is None else base
    block = min(triton.next_power_of_2(D), 1024)
    _combine_kernel[(T, triton.cdiv(D, block))](
        parts_ptr=parts,
        out_ptr=out,
        D=D,
        TOP_K=top_k,
        BLOCK=block,
        ADD=base is not None,
        num_warps=4,
        **dependent(parts),
    )
    return out


def _check(weight: Tensor, K: int) -> None:
    if weight.shape[2] != K or not weight.is_contiguous():
        raise ValueError(f"weight: {tuple(weight.shape)}, strides {weight.stride()}; expected {K} contiguous")
