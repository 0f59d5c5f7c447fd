"""fp8 products of a few rows with weights of 128x128 blocks, for a dense weight or for tiles of sorted pairs.

The weight is the tall side of the tensor cores' product, is streamed once and never leaves fp8. Rows come as sums
of two fp8 numbers (kernels/fp8_split.py). Called by linear and experts on a card.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dependent_launch import dependent, wait_and_release
from headrace.kernels.expert_sort import ExpertOrder
from headrace.kernels.fp8_block import BLOCK, Fp8Weight
from headrace.kernels.fp8_split import SplitRows
from headrace.kernels.silu_mul_triton import swiglu


@dataclass(frozen=True, slots=True)
class FewTuning:
    """Launch choices: a program makes `block_n` outputs, of both halves together for gate_up.

    It reads `groups` blocks of 128 inputs at a time.
    """

    block_n: int
    num_warps: int
    num_stages: int
    groups: int = 1


@triton.jit
def _few_gate_up_kernel(
    x_ptr,  # [T, 2, D]
    x_scale_ptr,  # [T]
    w_ptr,  # [E, 2F, D]
    w_scale_ptr,  # [E, 2F / 128, D / 128]
    pairs_ptr,
    tile_experts_ptr,
    num_tiles_ptr,
    out_ptr,  # [P, F]
    P,
    TOP_K,
    D,
    F,
    w_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    i_n = tl.program_id(0)
    i_tile = tl.program_id(1)
    wait_and_release(PDL)
    if i_tile < tl.load(num_tiles_ptr):
        HALF: tl.constexpr = BLOCK_N // 2
        i_e = tl.load(tile_experts_ptr + i_tile).to(tl.int64)
        b_pairs = tl.load(pairs_ptr + i_tile * BLOCK_M + tl.arange(0, BLOCK_M))
        m_mask = b_pairs < P
        rows = tl.where(m_mask, b_pairs // TOP_K, 0).to(tl.int64)
        # The upper half of the tile makes gates, the lower one their factors.
        offs = tl.arange(0, BLOCK_N)
        offs_n = offs // HALF * F + i_n * HALF + offs % HALF
        offs_k = tl.arange(0, 128)
        groups = D // 128
        p_x = x_ptr + rows[None, :] * (2 * D) + offs_k[:, None]
        p_w = w_ptr + i_e * w_stride + (offs_n[:, None] * D + offs_k[None, :])
        p_gate_scale = w_scale_ptr + (i_e * (2 * F // 128) + i_n * HALF // 128) * groups
        p_up_scale = p_gate_scale + F // 128 * groups
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for first in tl.range(0, groups, GROUPS, num_stages=STAGES):
            for i in tl.static_range(GROUPS):
                group = first + i
                b_w = tl.load(p_w + group * 128)
                # Empty places must not all ask for one row.
                high = tl.load(p_x + group * 128, mask=m_mask[None, :], other=0.0)
                low = tl.load(p_x + D + group * 128, mask=m_mask[None, :], other=0.0)
                part = tl.dot(b_w, low, tl.dot(b_w, high))
                scale = tl.where(offs < HALF, tl.load(p_gate_scale + group), tl.load(p_up_scale + group))
                acc += part * scale[:, None]
        acc *= tl.load(x_scale_ptr + rows)[None, :]
        gate, up = tl.split(tl.permute(tl.reshape(acc, [2, HALF, BLOCK_M]), [1, 2, 0]))
        p_out = out_ptr + b_pairs.to(tl.int64)[None, :] * F + (i_n * HALF + tl.arange(0, HALF))[:, None]
        tl.store(p_out, swiglu(gate, up).to(out_ptr.dtype.element_ty), mask=m_mask[None, :])


@triton.jit
def _few_kernel(
    x_ptr,  # [P, 2, K]
    x_scale_ptr,  # [P]
    w_ptr,  # [N, K], or [E, N, K] where SORTED
    w_scale_ptr,  # [E, N / 128, K / 128]
    shares_ptr,  # [P] float32 where SORTED
    pairs_ptr,
    tile_experts_ptr,
    num_tiles_ptr,
    out_ptr,  # [P, N], or [splits, P, N] where not SORTED
    P,
    N,
    K,
    w_stride,
    SPLIT_GROUPS,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUPS: tl.constexpr,
    STAGES: tl.constexpr,
    SORTED: tl.constexpr,
    PDL: tl.constexpr,
):
    i_n = tl.program_id(0)
    i_tile = tl.program_id(1)
    i_split = tl.program_id(2)
    wait_and_release(PDL)
    num_tiles = tl.load(num_tiles_ptr) if SORTED else tl.cdiv(P, BLOCK_M)
    if i_tile < num_tiles:
        b_pairs = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        i_e = i_tile.to(tl.int64) * 0
        if SORTED:
            i_e = tl.load(tile_experts_ptr + i_tile).to(tl.int64)
            b_pairs = tl.load(pairs_ptr + b_pairs)
        m_mask = b_pairs < P
        rows = tl.where(m_mask, b_pairs, 0).to(tl.int64)
        offs_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
        offs_k = tl.arange(0, 128)
        groups = K // 128
        p_x = x_ptr + rows[None, :] * (2 * K) + offs_k[:, None]
        # Rows beyond the last repeat it: cheaper than a mask, and never stored.
        p_w = w_ptr + i_e * w_stride + (tl.minimum(offs_n, N - 1)[:, None] * K + offs_k[None, :])
        p_scale = w_scale_ptr + (i_e * tl.cdiv(N, 128) + i_n * BLOCK_N // 128) * groups
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        begin = i_split * SPLIT_GROUPS
        for first in tl.range(begin, tl.minimum(begin + SPLIT_GROUPS, groups), GROUPS, num_stages=STAGES):
            for i in tl.static_range(GROUPS):
                group = first + i
                b_w = tl.load(p_w + group * 128)
                high = tl.load(p_x + group * 128, mask=m_mask[None, :], other=0.0)
                low = tl.load(p_x + K + group * 128, mask=m_mask[None, :], other=0.0)
                part = tl.dot(b_w, low, tl.dot(b_w, high))
                acc += part * tl.load(p_scale + group)
        factor = tl.load(x_scale_ptr + rows)
        if SORTED:
            factor *= tl.load(shares_ptr + b_pairs, mask=m_mask, other=0.0)
        acc *= factor[None, :]
        p_out = out_ptr + (i_split * P + rows)[None, :] * N + offs_n[:, None]
        tl.store(p_out, acc.to(out_ptr.dtype.element_ty), mask=m_mask[None, :] & (offs_n < N)[:, None])


@triton.jit
def _sum_splits_kernel(
    parts_ptr,  # [SPLITS, R * N] float32
    out_ptr,  # [R * N]; added to where ADD
    size,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    wait_and_release(PDL)
    acc = tl.zeros([BLOCK], tl.float32)
    if ADD:
        acc += tl.load(out_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    for split in tl.static_range(SPLITS):
        acc += tl.load(parts_ptr + split * size + offs, mask=mask, other=0.0)
    tl.store(out_ptr + offs, acc.to(out_ptr.dtype.element_ty), mask=mask)


def launch_few_gate_up(
    x: SplitRows, weight: Fp8Weight, order: ExpertOrder, top_k: int, dtype: torch.dtype, tuning: FewTuning
) -> Tensor:
    """[T, D], [E, 2F, D] -> SwiGLU of every pair's product, [T * top_k, F]. F a multiple of 128, as is D."""
    (T, _, D), F = x.values.shape, weight.shape[1] // 2
    _check(weight, D, D // BLOCK, tuning)
    half = tuning.block_n // 2
    if F % BLOCK or BLOCK % half:
        raise ValueError(
            f"weight: halves of {F} rows or {tuning} do not fit {BLOCK}x{BLOCK} blocks of scales"
        )
    out = torch.empty(T * top_k, F, dtype=dtype, device=x.values.device)
    _few_gate_up_kernel[(F // half, order.max_tiles)](
        x_ptr=x.values,
        x_scale_ptr=x.scales,
        w_ptr=weight.values,
        w_scale_ptr=weight.scale_inv,
        pairs_ptr=order.pairs,
        tile_experts_ptr=order.tile_experts,
        num_tiles_ptr=order.num_tiles,
        out_ptr=out,
        P=T * top_k,
        TOP_K=top_k,
        D=D,
        F=F,
        w_stride=weight.values.stride(0),
        BLOCK_M=order.block,
        BLOCK_N=tuning.block_n,
        GROUPS=tuning.groups,
        STAGES=tuning.num_stages,
        num_warps=tuning.num_warps,
        **dependent(out),
    )
    return out


def launch_few_down(
    x: SplitRows,
    weight: Fp8Weight,
    shares: Tensor,
    order: ExpertOrder,
    dtype: torch.dtype,
    tuning: FewTuning,
) -> Tensor:
    """[P, F], [E, D, F], each pair's share [T, K] float32 -> share * product, [P, D] of `dtype`."""
    P, N, groups = x.values.shape[0], weight.shape[1], weight.shape[2] // BLOCK
    _check(weight, x.values.shape[2], groups, tuning)
    out = torch.empty(P, N, dtype=dtype, device=x.values.device)
    grid = (triton.cdiv(N, tuning.block_n), order.max_tiles, 1)
    _launch(grid, x, weight, out, shares, order, order.block, groups, tuning)
    return out


def launch_few_linear(
    x: SplitRows,
    weight: Fp8Weight,
    dtype: torch.dtype,
    add_to: Tensor | None,
    block_m: int,
    splits: int,
    tuning: FewTuning,
) -> Tensor:
    """[T, K] x [N, K] -> [T, N] of `dtype`; into `add_to`, added, where given. K a multiple of 128.

    Args:
        splits: programs that share a sum over K.
    """
    (T, _, K), N = x.values.shape, weight.shape[0]
    per_split = triton.cdiv(K // BLOCK, splits)
    splits = triton.cdiv(K // BLOCK, per_split)
    _check(weight, K, per_split, tuning)
    device = x.values.device
    parts = torch.empty(splits, T, N, dtype=torch.float32, device=device)
    grid = (triton.cdiv(N, tuning.block_n), triton.cdiv(T, block_m), splits)
    _launch(grid, x, weight, parts, None, None, block_m, per_split, tuning)
    out = torch.empty(T, N, dtype=dtype, device=device) if add_to is None else add_to
    _sum_splits_kernel[(triton.cdiv(T * N, 512),)](
        parts_ptr=parts,
        out_ptr=out,
        size=T * N,
        SPLITS=splits,
        BLOCK=512,
        ADD=add_to is not None,
        num_warps=4,
        **dependent(out),
    )
    return out


def _launch(
    grid: tuple[int, int, int],
    x: SplitRows,
    weight: Fp8Weight,
    out: Tensor,
    shares: Tensor | None,
    order: ExpertOrder | None,
    block_m: int,
    split_groups: int,
    tuning: FewTuning,
) -> None:
    N, K = weight.shape[-2:]
    if BLOCK % tuning.block_n:
        raise ValueError(f"tuning: {tuning} crosses the {BLOCK}x{BLOCK} blocks of scales")
    _few_kernel[grid](
        x_ptr=x.values,
        x_scale_ptr=x.scales,
        w_ptr=weight.values,
        w_scale_ptr=weight.scale_inv,
        shares_ptr=shares,
        pairs_ptr=None if order is None else order.pairs,
        tile_experts_ptr=None if order is None else order.tile_experts,
        num_tiles_ptr=None if order is None else order.num_tiles,
        out_ptr=out,
        P=x.values.shape[0],
        N=N,
        K=K,
        w_stride=0 if order is None else weight.values.stride(0),
        SPLIT_GROUPS=split_groups,
        BLOCK_M=block_m,
        BLOCK_N=tuning.block_n,
        GROUPS=tuning.groups,
        STAGES=tuning.num_stages,
        SORTED=order is not None,
        num_warps=tuning.num_warps,
        **dependent(out),
    )


def _check(weight: Fp8Weight, K: int, groups: int, tuning: FewTuning) -> None:
    if weight.shape[-1] != K or K % BLOCK or not weight.values.is_contiguous():
        raise ValueError(
            f"weight: {tuple(weight.shape)}, strides {weight.values.stride()}; expected {K} contiguous, "
            f"a multiple of {BLOCK}"
        )
    if groups % tuning.groups:
        raise ValueError(f"tuning: {tuning.groups} blocks at a time do not divide {groups}")
