"""Attention over the paged latent cache: a row's heads and tokens form tiles that share every cache row they read.

The contexts of short rows are divided among programs. Called by mla_attention on a card.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention_parts import (
    Parts,
    Tiling,
    locate,
    make_parts,
    merge_parts,
    share_of,
    store_part,
    unit_tiles,
    units_block,
    whole_contexts,
)
from headrace.kernels.attention_plan import AttentionPlan
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
    programs_per_sm: int = 1


@triton.jit
def _attend(
    q_ptr,
    cache_ptr,
    query_starts_ptr,
    context_lens_ptr,
    tables_ptr,
    out_ptr,
    sums_ptr,
    stats_ptr,
    scale,
    q_stride_t,
    q_stride_h,
    block_stride,
    token_stride,
    table_stride,
    first_row,
    tiles,
    unit,
    begin,  # tiles of positions
    stop,
    i_part,
    whole,
    H: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """One unit over some of its tiles."""
    i_row = first_row + unit // tiles
    i_tile = unit % tiles
    start = tl.load(query_starts_ptr + i_row)
    num_tokens = tl.load(query_starts_ptr + i_row + 1) - start
    context = tl.load(context_lens_ptr + i_row)
    o_m = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = o_m // H
    head = o_m % H
    rows = token < num_tokens
    visible = tl.minimum(context - num_tokens + token + 1, context)
    seen = tl.minimum(context, context - num_tokens + ((i_tile + 1) * BLOCK_M - 1) // H + 1)
    end = tl.minimum(stop * BLOCK_N, seen)

    o_c = tl.arange(0, C)
    o_r = C + tl.arange(0, R)
    token_at = (start + token).to(tl.int64)
    p_q = q_ptr + (token_at * q_stride_t + head * q_stride_h)[:, None]
    b_q = tl.trans(tl.load(p_q + o_c[None, :], mask=rows[:, None], other=0.0))
    b_q_turned = tl.trans(tl.load(p_q + o_r[None, :], mask=rows[:, None], other=0.0))
    table = tables_ptr + i_row.to(tl.int64) * table_stride
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # Positions come first: they fill a tensor core's tile, which a token's heads would not.
    acc = tl.zeros([C, BLOCK_M], tl.float32)
    for n in range(begin * BLOCK_N, end, BLOCK_N):
        o_n = n + tl.arange(0, BLOCK_N)
        within = o_n < end
        block = tl.load(table + o_n // BLOCK_SIZE, mask=within, other=0).to(tl.int64)
        p_rows = cache_ptr + (block * block_stride + (o_n % BLOCK_SIZE) * token_stride)[:, None]
        # Unwritten slots may hold NaN, which no weight of 0 would cancel: they are read as 0.
        b_latent = tl.load(p_rows + o_c[None, :], mask=within[:, None], other=0.0)
        b_turned = tl.load(p_rows + o_r[None, :], mask=within[:, None], other=0.0)
        scores = tl.dot(b_turned, b_q_turned, input_precision="ieee")
        scores = tl.dot(b_latent, b_q, scores, input_precision="ieee")
        scores = tl.where(o_n[:, None] >= visible[None, :], float("-inf"), scores)
        weights, decay, m, total = add_scores(scores, scale, m, total, 0)
        acc = tl.dot(
            tl.trans(b_latent), weights.to(b_latent.dtype), acc * decay[None, :], input_precision="ieee"
        )

    store_part(
        tl.trans(acc),
        m,
        total,
        rows,
        out_ptr + token_at * (H * C) + head * C,
        sums_ptr,
        stats_ptr,
        i_part,
        whole,
        BLOCK_M,
        C,
    )


@triton.jit(do_not_specialize=["table_stride", "first_row", "units", "tiles", "fixed"])
def _mla_attention_kernel(
    q_ptr,  # [T, H, C + R]
    cache_ptr,  # [blocks, BLOCK_SIZE, C + R]
    query_starts_ptr,
    context_lens_ptr,
    tables_ptr,
    out_ptr,  # [T, H, C]
    sums_ptr,
    stats_ptr,
    scale,  # of the scores, times log2(e)
    q_stride_t,
    q_stride_h,
    block_stride,
    token_stride,
    table_stride,
    first_row,
    units,
    tiles,
    fixed,
    H: tl.constexpr,
    C: tl.constexpr,
    R: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_U: tl.constexpr,
    FIXED: tl.constexpr,
    PDL: tl.constexpr,
):
    i_program = tl.program_id(0)
    if FIXED:
        # The last tiles of a row see most: they start first.
        unit = i_program // tiles * tiles + tiles - 1 - i_program % tiles
        count = unit_tiles(
            query_starts_ptr, context_lens_ptr, unit, units, first_row, tiles, H, BLOCK_M, BLOCK_N
        )
        begin = tl.program_id(1) * fixed
        stop = tl.minimum(begin + fixed, count)
        wait_and_release(PDL)
        if begin < stop:
            _attend(
                q_ptr, cache_ptr, query_starts_ptr, context_lens_ptr, tables_ptr, out_ptr, sums_ptr, stats_ptr,
                scale, q_stride_t, q_stride_h, block_stride, token_stride, table_stride, first_row, tiles, unit,
                begin, stop, unit * tl.num_programs(1) + tl.program_id(1), count <= fixed,
                H, C, R, BLOCK_SIZE, BLOCK_M, BLOCK_N,
            )  # fmt: skip
    else:
        o_u = tl.arange(0, BLOCK_U)
        counts = unit_tiles(
            query_starts_ptr, context_lens_ptr, o_u, units, first_row, tiles, H, BLOCK_M, BLOCK_N
        )
        ends = tl.cumsum(counts, 0)
        total = tl.sum(counts, 0)
        share = share_of(total, tl.num_programs(0))
        at = i_program * share
        last = tl.minimum(at + share, total)
        wait_and_release(PDL)
        while at < last:
            unit, _, begin, count = locate(counts, ends, o_u, at, 1)
            stop = tl.minimum(count, begin + last - at)
            _attend(
                q_ptr, cache_ptr, query_starts_ptr, context_lens_ptr, tables_ptr, out_ptr, sums_ptr, stats_ptr,
                scale, q_stride_t, q_stride_h, block_stride, token_stride, table_stride, first_row, tiles, unit,
                begin, stop, 2 * i_program + (begin == 0).to(tl.int32), stop - begin == count,
                H, C, R, BLOCK_SIZE, BLOCK_M, BLOCK_N,
            )  # fmt: skip
            at += stop - begin


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
    paged = _paged(plan)
    tuning = tuning or _tuning(q, q.shape[1] * paged.short_len)
    tiling = _tiling(q, paged.num_short, paged.short_len, rank, tuning)
    parts = make_parts(paged, tiling, tuning.programs_per_sm)
    _launch(q, cache, plan, scale, out, tuning, tiling, parts, 0)
    merge_parts(plan, parts, tiling, out)


def mla_prefill(q: Tensor, cache: Tensor, plan: AttentionPlan, scale: float, rank: int, out: Tensor) -> None:
    """Fill `out` for the plan's long rows, whose tiles fill the card without a division."""
    paged = _paged(plan)
    tuning = _tuning(q, q.shape[1] * paged.long_len)
    tiling = _tiling(q, paged.num_long, paged.long_len, rank, tuning)
    parts = whole_contexts(paged, tiling)
    _launch(q, cache, plan, scale, out, tuning, tiling, parts, paged.num_short)


def _tiling(q: Tensor, rows: int, row_tokens: int, rank: int, tuning: MlaTuning) -> Tiling:
    heads = q.shape[1]
    return Tiling(
        rows=rows,
        tiles=triton.cdiv(heads * row_tokens, tuning.block_m),
        kv_heads=1,
        group=heads,
        block_m=tuning.block_m,
        block_n=tuning.block_n,
        dim=rank,
    )


def _launch(
    q: Tensor,
    cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    out: Tensor,
    tuning: MlaTuning,
    tiling: Tiling,
    parts: Parts,
    first_row: int,
) -> None:
    tokens, heads, width = q.shape
    rank = tiling.dim
    assert q.dtype == cache.dtype == out.dtype, f"q {q.dtype}, cache {cache.dtype}, out {out.dtype}"
    assert q.stride(2) == cache.stride(2) == 1, "the last dimension must be contiguous"
    assert out.is_contiguous() and out.shape == (tokens, heads, rank), f"out is {tuple(out.shape)}"
    for size in (rank, width - rank):
        assert size >= 16 and size & (size - 1) == 0, f"{size} is no power of two from 16"
    _mla_attention_kernel[parts.grid](
        q_ptr=q,
        cache_ptr=cache,
        query_starts_ptr=plan.query_starts,
        context_lens_ptr=plan.context_lens,
        tables_ptr=plan.block_tables,
        out_ptr=out,
        sums_ptr=parts.sums,
        stats_ptr=parts.stats,
        scale=scale * LOG2_E,
        q_stride_t=q.stride(0),
        q_stride_h=q.stride(1),
        block_stride=cache.stride(0),
        token_stride=cache.stride(1),
        table_stride=plan.block_tables.stride(0),
        first_row=first_row,
        units=tiling.units,
        tiles=tiling.tiles,
        fixed=parts.fixed,
        H=heads,
        C=rank,
        R=width - rank,
        BLOCK_SIZE=cache.shape[1],
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        BLOCK_U=units_block(tiling) if not parts.fixed else 16,
        FIXED=parts.fixed > 0,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        **dependent(q),
    )


def _tuning(q: Tensor, queries: int) -> MlaTuning:
    """By dtype and by the queries (heads times tokens) of a row."""
    if q.dtype is torch.float32:
        return MlaTuning(block_m=16, block_n=16, num_warps=4, num_stages=1)
    if queries <= 16:
        return MlaTuning(block_m=16, block_n=64, num_warps=4, num_stages=2)
    if queries <= 32:
        return MlaTuning(block_m=32, block_n=64, num_warps=8, num_stages=2)
    return MlaTuning(block_m=64, block_n=64, num_warps=8, num_stages=2)


def _paged(plan: AttentionPlan) -> PagedPlan:
    assert plan.paged is not None, "the plan was made for the CPU"
    return plan.paged
