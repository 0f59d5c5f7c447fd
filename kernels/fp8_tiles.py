"""fp8 products for many tokens: both sides e4m3, a scale for each token's 128 numbers and each 128x128 block.

Tensor cores sum 128 numbers at a time; the scales are applied to each such sum in float32, as DeepSeek-V3 does
(arXiv 2412.19437, 3.3.2). For a dense weight or for tiles of sorted pairs. Called by linear and experts on a card.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.expert_sort import ExpertOrder
from headrace.kernels.experts_tiles import tile_of
from headrace.kernels.fp8_block import BLOCK, E4M3_MAX, Fp8Weight
from headrace.kernels.silu_mul_triton import swiglu

_GROUP = 8
_ROWS = 8  # a program quantises
LEAST = 1e-30  # largest number of a group that is not taken for zeros


@dataclass(frozen=True, slots=True)
class Fp8Tuning:
    """Launch choices: a tile of block_m rows and block_n outputs."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # of a thread, so that one more program fits a multiprocessor


@dataclass(frozen=True, slots=True)
class Fp8Rows:
    """Activations as the products take them."""

    values: Tensor  # [R, K] float8_e4m3fn
    scales: Tensor  # [R, ceil(K / 128)] float32


@triton.jit
def _quantize_rows_kernel(
    x_ptr,  # [R, K], or [R, 2K] where SWIGLU
    values_ptr,
    scales_ptr,
    R,
    K,
    x_stride,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    SWIGLU: tl.constexpr,
):
    i_group = tl.program_id(1)
    offs_r = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    offs_k = i_group * BLOCK + tl.arange(0, BLOCK)
    r_mask = offs_r < R
    mask = r_mask[:, None] & (offs_k < K)[None, :]
    p_x = x_ptr + offs_r[:, None] * x_stride + offs_k[None, :]
    b_x = tl.load(p_x, mask=mask, other=0.0).to(tl.float32)
    if SWIGLU:
        b_x = swiglu(b_x, tl.load(p_x + K, mask=mask, other=0.0).to(tl.float32))
    scale = tl.maximum(tl.max(tl.abs(b_x), 1), LEAST) / LARGEST
    values = tl.minimum(tl.maximum(b_x / scale[:, None], -LARGEST), LARGEST)
    p_values = values_ptr + offs_r[:, None] * K + offs_k[None, :]
    tl.store(p_values, values.to(values_ptr.dtype.element_ty), mask=mask)
    tl.store(scales_ptr + offs_r * tl.cdiv(K, BLOCK) + i_group, scale, mask=r_mask)


@triton.jit
def _fp8_tiles_kernel(
    x_ptr,  # [R, K]
    x_scale_ptr,  # [R, K / 128]
    w_ptr,  # [E, N, K]
    w_scale_ptr,  # [E, N / 128, K / 128]
    shares_ptr,  # [P] float32 where SHARES
    pairs_ptr,
    tile_experts_ptr,
    num_tiles_ptr,
    out_ptr,  # [P, N]
    P,
    TOP_K,
    N,
    K,
    w_stride,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    EVEN: tl.constexpr,  # whether K is whole blocks
    SORTED: tl.constexpr,
    SHARES: tl.constexpr,
):
    num_tiles = tl.load(num_tiles_ptr) * PARTS if SORTED else tl.cdiv(P, BLOCK_M)
    i_tile, i_n = tile_of(num_tiles, tl.cdiv(N, BLOCK_N), GROUP)
    live = i_tile < num_tiles
    if PARTS > 1:
        # A part of one of the order's tiles may be empty.
        live = tl.load(pairs_ptr + i_tile * BLOCK_M, mask=live, other=P) < P
    if live:
        offs_m = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        if SORTED:
            i_e = tl.load(tile_experts_ptr + i_tile // PARTS).to(tl.int64)
            b_pairs = tl.load(pairs_ptr + offs_m)
        else:
            i_e = tl.program_id(1).to(tl.int64)
            b_pairs = offs_m
        m_mask = b_pairs < P
        rows = tl.where(m_mask, b_pairs // TOP_K, 0).to(tl.int64)
        offs_n = i_n * BLOCK_N + tl.arange(0, BLOCK_N)
        offs_k = tl.arange(0, 128)
        groups = tl.cdiv(K, 128)
        p_x = x_ptr + rows[:, None] * K + offs_k[None, :]
        # Outputs beyond the last repeat it: cheaper than a mask, and never stored. Empty places among the rows are
        # many, and must not all ask for one.
        p_w = w_ptr + i_e * w_stride + (tl.minimum(offs_n, N - 1)[None, :] * K + offs_k[:, None])
        p_x_scale = x_scale_ptr + rows * groups
        p_w_scale = w_scale_ptr + (i_e * tl.cdiv(N, 128) + i_n * BLOCK_N // 128) * groups
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for group in tl.range(0, groups, num_stages=STAGES):
            k = group * 128
            if EVEN:
                b_x = tl.load(p_x + k, mask=m_mask[:, None], other=0.0)
                b_w = tl.load(p_w + k)
            else:
                b_x = tl.load(p_x + k, mask=m_mask[:, None] & (offs_k < K - k)[None, :], other=0.0)
                b_w = tl.load(p_w + k, mask=(offs_k < K - k)[:, None], other=0.0)
            scale = tl.load(p_x_scale + group) * tl.load(p_w_scale + group)
            acc += tl.dot(b_x, b_w) * scale[:, None]
        if SHARES:
            acc *= tl.load(shares_ptr + b_pairs, mask=m_mask, other=0.0)[:, None]
        p_out = out_ptr + b_pairs.to(tl.int64)[:, None] * N + offs_n[None, :]
        tl.store(p_out, acc.to(out_ptr.dtype.element_ty), mask=m_mask[:, None] & (offs_n < N)[None, :])


def launch_quantize_rows(x: Tensor, *, swiglu_first: bool = False) -> Fp8Rows:
    """[R, K] to fp8, 128 numbers of a row sharing a scale; with `swiglu_first`, SwiGLU of [R, 2K]."""
    R, K = x.shape[0], x.shape[1] // 2 if swiglu_first else x.shape[1]
    if x.stride(1) != 1:
        raise ValueError(f"x: rows must be contiguous, strides are {x.stride()}")
    groups = triton.cdiv(K, BLOCK)
    values = torch.empty(R, K, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(R, groups, dtype=torch.float32, device=x.device)
    _quantize_rows_kernel[(triton.cdiv(R, _ROWS), groups)](
        x_ptr=x,
        values_ptr=values,
        scales_ptr=scales,
        R=R,
        K=K,
        x_stride=x.stride(0),
        LARGEST=E4M3_MAX,
        LEAST=LEAST,
        ROWS=_ROWS,
        BLOCK=BLOCK,
        SWIGLU=swiglu_first,
        num_warps=4,
    )
    return Fp8Rows(values, scales)


def launch_fp8_tiles(
    x: Fp8Rows,
    weight: Fp8Weight,
    dtype: torch.dtype,
    *,
    order: ExpertOrder | None = None,
    top_k: int = 1,
    shares: Tensor | None = None,
    tuning: Fp8Tuning | None = None,
) -> Tensor:
    """The product of each row with the dense weight, or of each sorted pair with its expert's.

    Args:
        x: R rows of K numbers; pair p takes row p // top_k.
        weight: [N, K], or [E, N, K] with `order`.
        dtype: of the result.
        order: of P pairs.
        top_k: pairs that share a row.
        shares: [P] float32, what each pair's product is multiplied by.
        tuning: None = the table's; its block_m divides the order's where there is one.

    Returns:
        [R, N] or [P, N].
    """
    N, K = weight.shape[-2:]
    if x.values.shape[1] != K or not weight.values.is_contiguous():
        raise ValueError(
            f"weight: {tuple(weight.shape)}, strides {weight.values.stride()}; x has {K} columns"
        )
    P = x.values.shape[0] * top_k
    out = torch.empty(P, N, dtype=dtype, device=x.values.device)
    tuning = fp8_tuning(P, N, order) if tuning is None else tuning
    block_m, block_n = tuning.block_m, tuning.block_n
    if BLOCK % block_n:
        raise ValueError(f"tuning: {tuning} crosses the {BLOCK}x{BLOCK} blocks of scales")
    if order is not None and order.block % block_m:
        raise ValueError(f"tuning: tiles of {block_m} rows do not divide the order's of {order.block}")
    tiles = triton.cdiv(P, block_m) if order is None else order.max_tiles * (order.block // block_m)
    _fp8_tiles_kernel[(tiles * triton.cdiv(N, block_n),)](
        x_ptr=x.values,
        x_scale_ptr=x.scales,
        w_ptr=weight.values,
        w_scale_ptr=weight.scale_inv,
        shares_ptr=shares,
        pairs_ptr=None if order is None else order.pairs,
        tile_experts_ptr=None if order is None else order.tile_experts,
        num_tiles_ptr=None if order is None else order.num_tiles,
        out_ptr=out,
        P=P,
        TOP_K=top_k,
        N=N,
        K=K,
        w_stride=0 if order is None else weight.values.stride(0),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        STAGES=tuning.num_stages,
        GROUP=_GROUP,
        PARTS=1 if order is None else order.block // block_m,
        EVEN=K % BLOCK == 0,
        SORTED=order is not None,
        SHARES=shares is not None,
        num_warps=tuning.num_warps,
        maxnreg=tuning.max_registers,
    )
    return out


def fp8_tuning(pairs: int, outputs: int, order: ExpertOrder | None) -> Fp8Tuning:
    """Tiles of 64 rows at least: below, the tensor cores take no fp8 and numbers are widened one by one."""
    if order is not None:
        return Fp8Tuning(order.block, 128, 8 if order.block >= 128 else 4, 4)
    if pairs <= 256:
        # Few rows: programs enough to ask for the whole weight at once.
        return Fp8Tuning(64, 64 if outputs <= 8192 else 128, 4, 6)
    return Fp8Tuning(64, 128, 4, 3, max_registers=168)
