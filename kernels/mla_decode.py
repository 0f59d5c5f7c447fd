"""Attention over the paged latent cache: a row's heads and tokens form tiles that share every cache row they read.

Contexts are split among programs where the tiles would not fill the card. Called by mla_attention on a card.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention_plan import AttentionPlan
from headrace.kernels.attention_split import (
    Splits,
    Tiling,
    make_splits,
    merge_parts,
    split_length,
    store_part,
    whole_context,
)
from headrace.kernels.dependent_launch import dependent, wait_and_release
from headrace.kernels.online_softmax import LOG2_E, add_scores
from headrace.kernels.paged_plan import PagedPlan


@dataclass(frozen=True, slots=True)
class MlaTuning:
    """Launch choices of one shape."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    min_split: int = 32  # positions that a part is worth
    programs_per_sm: int = 4
    max_registers: int | None = None  # of a thread; fewer let more programs share a multiprocessor


@triton.jit(do_not_specialize=["first_row", "tiles", "num_splits", "fixed", "least", "table_stride"])
def _mla_attention_kernel(
    q_ptr,  # [T, H, C + R]
    cache_ptr,  # [blocks, BLOCK_SIZE, C + R]
    query_starts_ptr,
    context_lens_ptr,
    tables_ptr,
    out_ptr,  # [T, H, C]
    partial_ptr,
    stats_ptr,
    scale,  # of the scores, times log2(e)
    first_row,
    tiles,  # of a row
    q_stride_t,
    q_stride_h,
    block_stride,
    token_stride,
    table_stride,
    num_splits,
    fixed,
    least,
    H: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    i_split = tl.program_id(1)
    i_row = first_row + tl.program_id(0) // tiles
    # The last tiles see most: they start first.
    i_tile = tiles - 1 - tl.program_id(0) % tiles
    start = tl.load(query_starts_ptr + i_row)
    num_tokens = tl.load(query_starts_ptr + i_row + 1) - start
    context = tl.load(context_lens_ptr + i_row)
    wait_and_release(PDL)
    if i_tile * BLOCK_M >= num_tokens * H:
        return
    length = split_length(context, num_splits, fixed, least, BLOCK_N)
    first = i_split * length
    # A row without context still gets zeros.
    if (first >= context) & (i_split > 0):
        return
    o_m = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = o_m // H
    head = o_m % H
    rows = token < num_tokens
    visible = context - num_tokens + token + 1
    tile_visible = tl.minimum(context, context - num_tokens + ((i_tile + 1) * BLOCK_M - 1) // H + 1)
    end = tl.minimum(first + length, tile_visible)

    o_c = tl.arange(0, C)
    o_r = C + tl.arange(0, R)
    token_at = (start + token).to(tl.int64)
    p_q = q_ptr + (token_at * q_stride_t + head * q_stride_h)[:, None]
    b_q = tl.load(p_q + o_c[None, :], mask=rows[:, None], other=0.0)
    b_q_turned = tl.load(p_q + o_r[None, :], mask=rows[:, None], other=0.0)
    table = tables_ptr + i_row.to(tl.int64) * table_stride
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, C], tl.float32)
    for n in range(first, end, BLOCK_N):
        o_n = n + tl.arange(0, BLOCK_N)
        within = o_n < end
        block = tl.load(table + o_n // BLOCK_SIZE, mask=within, other=0).to(tl.int64)
        at = block * block_stride + (o_n % BLOCK_SIZE) * token_stride
        # Unwritten slots may hold NaN, which no weight of 0 would cancel: they are read as 0.
        p_rows = cache_ptr + at[:, None]
        b_latent = tl.load(p_rows + o_c[None, :], mask=within[:, None], other=0.0)
        b_turned = tl.load(cache_ptr + at[None, :] + o_r[:, None], mask=within[None, :], other=0.0)
        scores = tl.dot(b_q_turned, b_turned, input_precision="ieee")
        scores = tl.dot(b_q, tl.trans(b_latent), scores, input_precision="ieee")
        hidden = o_n[None, :] >= tl.minimum(visible, end)[:, None]
        scores = tl.where(hidden, float("-inf"), scores)
        weights, decay, m, total = add_scores(scores, scale, m, total, 1)
        acc = tl.dot(weights.to(b_latent.dtype), b_latent, acc * decay[:, None], input_precision="ieee")

    store_part(
        acc,
        m,
        total,
        rows,
        out_ptr + token_at * (H * C) + head * C,
        partial_ptr,
        stats_ptr,
        ((i_row - first_row) * tiles + i_tile) * num_splits + i_split,
        context <= length,
        BLOCK_M,
        C,
    )


def mla_decode(
    q: Tensor,
    cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    rank: int,
    out: Tensor,
    tuning: MlaTuning | None = None,
) -> None:
    """Fill `out` for the plan's short rows.

    Args:
        q: [T, H, C + R], the last dimension contiguous.
        cache: [blocks, block_size, C + R] of one layer.
        plan: with its paged part.
        scale: factor of the scores.
        rank: C.
        out: [T, H, C], written for the tokens of short rows.
        tuning: None = by dtype and number of heads.
    """
    splits, tiling = mla_decode_parts(q, cache, plan, scale, rank, out, tuning)
    merge_parts(plan, _paged(plan), splits, tiling, out)


def mla_decode_parts(
    q: Tensor,
    cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    rank: int,
    out: Tensor,
    tuning: MlaTuning | None = None,
) -> tuple[Splits, Tiling]:
    """The same, with what is divided left in its parts; `out` holds the rest."""
    paged = _paged(plan)
    tuning = tuning or _tuning(q, q.shape[1] * paged.short_len)
    tiling = _tiling(q, paged.short_len, rank, tuning)
    splits = make_splits(paged, tiling, tuning.min_split, tuning.programs_per_sm)
    _launch(q, cache, plan, scale, out, tuning, tiling, splits, 0, paged.num_short)
    return splits, tiling


def mla_prefill(q: Tensor, cache: Tensor, plan: AttentionPlan, scale: float, rank: int, out: Tensor) -> None:
    """Fill `out` for the plan's long rows, whose tiles fill the card without a split."""
    paged = _paged(plan)
    tuning = _tuning(q, q.shape[1] * paged.long_len)
    tiling = _tiling(q, paged.long_len, rank, tuning)
    splits = whole_context(paged, tiling)
    _launch(q, cache, plan, scale, out, tuning, tiling, splits, paged.num_short, paged.num_long)


def _tiling(q: Tensor, row_tokens: int, rank: int, tuning: MlaTuning) -> Tiling:
    heads = q.shape[1]
    return Tiling(
        triton.cdiv(heads * row_tokens, tuning.block_m), 1, heads, tuning.block_m, tuning.block_n, rank
    )


def _launch(
    q: Tensor,
    cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    out: Tensor,
    tuning: MlaTuning,
    tiling: Tiling,
    splits: Splits,
    first_row: int,
    num_rows: int,
) -> None:
    tokens, heads, width = q.shape
    rank = tiling.dim
    assert q.dtype == cache.dtype == out.dtype, f"q {q.dtype}, cache {cache.dtype}, out {out.dtype}"
    assert q.stride(2) == cache.stride(2) == 1, "the last dimension must be contiguous"
    assert out.is_contiguous() and out.shape == (tokens, heads, rank), f"out is {tuple(out.shape)}"
    for size in (rank, width - rank):
        assert size >= 16 and size & (size - 1) == 0, f"{size} is no power of two from 16"
    _mla_attention_kernel[(num_rows * tiling.tiles, splits.count)](
        q_ptr=q,
        cache_ptr=cache,
        query_starts_ptr=plan.query_starts,
        context_lens_ptr=plan.context_lens,
        tables_ptr=plan.block_tables,
        out_ptr=out,
        partial_ptr=splits.partial,
        stats_ptr=splits.stats,
        scale=scale * LOG2_E,
        first_row=first_row,
        tiles=tiling.tiles,
        q_stride_t=q.stride(0),
        q_stride_h=q.stride(1),
        block_stride=cache.stride(0),
        token_stride=cache.stride(1),
        table_stride=plan.block_tables.stride(0),
        num_splits=splits.count,
        fixed=splits.fixed,
        least=splits.least,
        H=heads,
        C=rank,
        R=width - rank,
        BLOCK_SIZE=cache.shape[1],
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        maxnreg=tuning.max_registers,
        **dependent(q),
    )


def _tuning(q: Tensor, queries: int) -> MlaTuning:
    """By dtype and by the queries (heads times tokens) of a row."""
    if q.dtype is torch.float32:
        return MlaTuning(block_m=16, block_n=16, num_warps=4, num_stages=1)
    if queries <= 16:
        return MlaTuning(block_m=16, block_n=32, num_warps=4, num_stages=3)
    if queries <= 32:
        return MlaTuning(block_m=32, block_n=32, num_warps=8, num_stages=3)
    return MlaTuning(block_m=64, block_n=32, num_warps=8, num_stages=2)


def _paged(plan: AttentionPlan) -> PagedPlan:
    assert plan.paged is not None, "the plan was made for the CPU"
    return plan.paged
