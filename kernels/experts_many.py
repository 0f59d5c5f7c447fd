"""The routed experts' products where every expert has full tiles: bf16 or fp16, weights by the copy engine.

One dot makes gate and up together, their rows interleaved, so that each tile of tokens is read once and the tensor
cores work on the widest tiles. Fewer tokens, or other types: kernels/experts_tiles.py. Called by experts on a card.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.kernels.expert_sort import ExpertOrder
from headrace.kernels.experts_tiles import TileTuning, tile_of
from headrace.kernels.silu_mul_triton import swiglu

_ALIGNMENT = 16  # bytes between the rows of what the copy engine reads


@triton.jit(do_not_specialize=["P"])
def _gate_up_many_kernel(
    x_ptr,  # [T, D]
    w_desc,  # [E, F, 2, D] in blocks [1, BLOCK_N, 2, BLOCK_K]: a row of the gate, then the same of up
    pairs_ptr,
    tile_experts_ptr,
    num_tiles_ptr,
    out_ptr,  # [P, F]
    P,
    D,
    F,
    x_stride,
    TOP_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
):
    num_tiles = tl.load(num_tiles_ptr)
    i_tile, i_n = tile_of(num_tiles, tl.cdiv(F, BLOCK_N), GROUP)
    if i_tile < num_tiles:
        i_e = tl.load(tile_experts_ptr + i_tile)
        b_pairs = tl.load(pairs_ptr + i_tile * BLOCK_M + tl.arange(0, BLOCK_M))
        m_mask = b_pairs < P
        offs_k = tl.arange(0, BLOCK_K)
        p_x = x_ptr + (b_pairs // TOP_K).to(tl.int64)[:, None] * x_stride + offs_k[None, :]
        acc = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
        for k in tl.range(0, D, BLOCK_K, num_stages=STAGES):
            b_x = tl.load(p_x + k, mask=m_mask[:, None] & (offs_k < D - k)[None, :], other=0.0)
            b_w = w_desc.load([i_e, i_n * BLOCK_N, 0, k]).reshape(2 * BLOCK_N, BLOCK_K)
            acc = tl.dot(b_x, b_w.T, acc)
        b_gate, b_up = acc.reshape(BLOCK_M, BLOCK_N, 2).split()
        offs_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
        p_out = out_ptr + b_pairs.to(tl.int64)[:, None] * F + offs_n[None, :]
        out = swiglu(b_gate, b_up).to(out_ptr.dtype.element_ty)
        tl.store(p_out, out, mask=m_mask[:, None] & (offs_n < F)[None, :])


@triton.jit(do_not_specialize=["P"])
def _down_many_kernel(
    x_ptr,  # [P, F]
    w_desc,  # [E, D, F] in blocks [1, BLOCK_N, BLOCK_K]
    shares_ptr,  # [P] float32
    pairs_ptr,
    tile_experts_ptr,
    num_tiles_ptr,
    out_ptr,  # [P, D]
    P,
    D,
    F,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
):
    num_tiles = tl.load(num_tiles_ptr)
    i_tile, i_n = tile_of(num_tiles, tl.cdiv(D, BLOCK_N), GROUP)
    if i_tile < num_tiles:
        i_e = tl.load(tile_experts_ptr + i_tile)
        b_pairs = tl.load(pairs_ptr + i_tile * BLOCK_M + tl.arange(0, BLOCK_M))
        m_mask = b_pairs < P
        offs_k = tl.arange(0, BLOCK_K)
        p_x = x_ptr + b_pairs.to(tl.int64)[:, None] * F + offs_k[None, :]
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in tl.range(0, F, BLOCK_K, num_stages=STAGES):
            b_x = tl.load(p_x + k, mask=m_mask[:, None] & (offs_k < F - k)[None, :], other=0.0)
            b_w = w_desc.load([i_e, i_n * BLOCK_N, k]).reshape(BLOCK_N, BLOCK_K)
            acc = tl.dot(b_x, b_w.T, acc)
        acc *= tl.load(shares_ptr + b_pairs, mask=m_mask, other=0.0)[:, None]
        offs_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
        p_out = out_ptr + b_pairs.to(tl.int64)[:, None] * D + offs_n[None, :]
        tl.store(p_out, acc.to(out_ptr.dtype.element_ty), mask=m_mask[:, None] & (offs_n < D)[None, :])


def takes_many(gate_up: Tensor, down: Tensor) -> bool:
    """Whether the copy engine can read these weights ([E, 2F, D] and [E, D, F])."""
    return gate_up.dtype in (torch.bfloat16, torch.float16) and all(
        stack.is_contiguous() and stack.shape[2] * stack.element_size() % _ALIGNMENT == 0
        for stack in (gate_up, down)
    )


def launch_gate_up_many(
    x: Tensor, weight: Tensor, order: ExpertOrder, top_k: int, tuning: TileTuning
) -> Tensor:
    """See launch_gate_up."""
    (T, D), (E, F) = x.shape, (weight.shape[0], weight.shape[1] // 2)
    out = torch.empty(T * top_k, F, dtype=x.dtype, device=x.device)
    pairs_of_rows = TensorDescriptor(
        weight, [E, F, 2, D], [2 * F * D, D, F * D, 1], [1, tuning.block_n, 2, tuning.block_k]
    )
    _gate_up_many_kernel[(order.max_tiles * triton.cdiv(F, tuning.block_n),)](
        x_ptr=x,
        w_desc=pairs_of_rows,
        pairs_ptr=order.pairs,
        tile_experts_ptr=order.tile_experts,
        num_tiles_ptr=order.num_tiles,
        out_ptr=out,
        P=T * top_k,
        D=D,
        F=F,
        x_stride=x.stride(0),
        TOP_K=top_k,
        BLOCK_M=order.block,
        BLOCK_N=tuning.block_n,
        BLOCK_K=tuning.block_k,
        STAGES=tuning.num_stages,
        GROUP=tuning.group,
        num_warps=tuning.num_warps,
    )
    return out


def launch_down_many(
    x: Tensor, weight: Tensor, shares: Tensor, order: ExpertOrder, tuning: TileTuning
) -> Tensor:
    """See launch_down; the parts have x's dtype."""
    (P, F), (E, D) = x.shape, weight.shape[:2]
    out = torch.empty(P, D, dtype=x.dtype, device=x.device)
    _down_many_kernel[(order.max_tiles * triton.cdiv(D, tuning.block_n),)](
        x_ptr=x,
        w_desc=TensorDescriptor(weight, [E, D, F], [D * F, F, 1], [1, tuning.block_n, tuning.block_k]),
        shares_ptr=shares,
        pairs_ptr=order.pairs,
        tile_experts_ptr=order.tile_experts,
        num_tiles_ptr=order.num_tiles,
        out_ptr=out,
        P=P,
        D=D,
        F=F,
        BLOCK_M=order.block,
        BLOCK_N=tuning.block_n,
        BLOCK_K=tuning.block_k,
        STAGES=tuning.num_stages,
        GROUP=tuning.group,
        num_warps=tuning.num_warps,
    )
    return out
