"""Division of a context among programs that each attend to a part, and the merge of their results.

Flash-decoding (crfm.stanford.edu/2023/10/12/flashdecoding.html): where parts begin follows from the row's own
context, and they are merged in order, so that timing never changes a sum. Used by the decode kernels.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention_plan import AttentionPlan
from headrace.kernels.dependent_launch import dependent, wait_and_release
from headrace.kernels.paged_plan import PagedPlan

MAX_SPLITS = 64
_MERGED_COLUMNS = 128  # of a program that merges


@dataclass(frozen=True, slots=True)
class Splits:
    """`count` programs a tile; each takes `fixed` positions, or an equal share, at least `least`, where it is 0."""

    count: int
    fixed: int
    least: int
    partial: Tensor  # [tiles, count, BLOCK_M, D] float32, sums not yet divided
    stats: Tensor  # [tiles, count, 2, BLOCK_M] float32: maximum (base 2), sum of weights


@dataclass(frozen=True, slots=True)
class Tiling:
    """How queries are laid out: `tiles` of BLOCK_M for each row and key-value head, GROUP heads a token."""

    tiles: int
    kv_heads: int
    group: int
    block_m: int
    block_n: int  # positions that a program takes at a time
    dim: int  # D of the result


def make_splits(plan: PagedPlan, tiling: Tiling, least: int, programs_per_sm: int) -> Splits:
    """Divide contexts where the tiles alone would leave multiprocessors idle.

    A recorded step launches all `count` programs of a tile whatever its context, and one without work still costs
    about a microsecond of its place: hence a bound on their number, and larger parts where there are many tiles.

    Args:
        plan: of the step.
        tiling: of the short rows.
        least: positions of the smallest part; up to four times as many where tiles compete.
        programs_per_sm: to aim at.
    """
    tiles = plan.num_short * tiling.tiles * tiling.kv_heads
    if plan.split_size is not None:
        count, fixed = -(-plan.capacity // plan.split_size), plan.split_size
    elif tiles > plan.num_sms:
        return whole_context(plan, tiling)
    else:
        least *= 1 if 16 * tiles <= plan.num_sms else 2 if 4 * tiles <= plan.num_sms else 4
        useful = min(-(-plan.capacity // least), MAX_SPLITS)
        count, fixed = max(1, min(programs_per_sm * plan.num_sms // tiles, useful)), 0
    return _allocate(tiles, count, fixed, least, tiling, plan.device)


def whole_context(plan: PagedPlan, tiling: Tiling) -> Splits:
    """No division."""
    return _allocate(0, 1, 0, plan.capacity, tiling, plan.device)


def _allocate(tiles: int, count: int, fixed: int, least: int, tiling: Tiling, device: torch.device) -> Splits:
    parts = tiles * count * tiling.block_m if count > 1 else 0
    return Splits(
        count=count,
        fixed=fixed,
        least=least,
        partial=torch.empty(parts * tiling.dim, dtype=torch.float32, device=device),
        stats=torch.empty(parts * 2, dtype=torch.float32, device=device),
    )


@triton.jit
def split_length(context, num_splits, fixed, least, BLOCK_N: tl.constexpr):
    """Positions of one part."""
    share = tl.cdiv(tl.cdiv(context, num_splits), BLOCK_N) * BLOCK_N
    return tl.where(fixed > 0, fixed, tl.maximum(share, least))


@triton.jit
def store_part(
    acc,  # [BLOCK_M, D]
    m,
    total,
    rows,  # [BLOCK_M], which queries exist
    out_rows,  # [BLOCK_M] pointers, where their results begin
    partial_ptr,
    stats_ptr,
    i_part,
    whole,  # the part is the context
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
):
    """Write a tile's result, or keep what `merge_parts` needs of it."""
    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, D)
    if whole:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_rows[:, None] + o_d[None, :], acc.to(out_rows.dtype.element_ty), mask=rows[:, None])
    else:
        at = i_part.to(tl.int64) * BLOCK_M + o_m
        tl.store(partial_ptr + at[:, None] * D + o_d[None, :], acc, mask=rows[:, None])
        p_stats = stats_ptr + i_part.to(tl.int64) * (2 * BLOCK_M) + o_m
        tl.store(p_stats, m, mask=rows)
        tl.store(p_stats + BLOCK_M, total, mask=rows)


@triton.jit(do_not_specialize=["num_splits", "fixed", "least", "row_tokens", "tiles"])
def _merge_kernel(
    partial_ptr,
    stats_ptr,
    query_starts_ptr,
    context_lens_ptr,
    out_ptr,  # [T, heads, D]
    num_splits,
    fixed,
    least,
    row_tokens,  # programs of a row
    tiles,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLITS: tl.constexpr,
    SLICE: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    i_row = tl.program_id(0) // row_tokens
    token = tl.program_id(0) % row_tokens
    i_head = tl.program_id(1)
    start = tl.load(query_starts_ptr + i_row)
    end = tl.load(query_starts_ptr + i_row + 1)
    context = tl.load(context_lens_ptr + i_row)
    wait_and_release(PDL)
    used = tl.cdiv(context, split_length(context, num_splits, fixed, least, BLOCK_N))
    if (token >= end - start) | (used <= 1):
        return
    query = token * GROUP + i_head % GROUP
    tile = (i_row * tiles + query // BLOCK_M) * KV_HEADS + i_head // GROUP
    first = tile.to(tl.int64) * num_splits
    stats = stats_ptr + first * (2 * BLOCK_M) + query % BLOCK_M
    o_s = tl.arange(0, SPLITS)
    b_m = tl.load(stats + o_s * (2 * BLOCK_M), mask=o_s < used, other=float("-inf"))
    b_total = tl.load(stats + o_s * (2 * BLOCK_M) + BLOCK_M, mask=o_s < used, other=0.0)
    m = tl.max(b_m, 0)
    total = tl.sum(b_total * tl.exp2(b_m - m), 0)

    o_d = tl.program_id(2) * SLICE + tl.arange(0, SLICE)
    acc = tl.zeros([SLICE], tl.float32)
    for s in range(0, used, CHUNK):
        o_c = s + tl.arange(0, CHUNK)
        chunk_m = tl.load(stats + o_c * (2 * BLOCK_M), mask=o_c < used, other=float("-inf"))
        at = (first + o_c) * BLOCK_M + query % BLOCK_M
        b_part = tl.load(partial_ptr + at[:, None] * D + o_d[None, :], mask=(o_c < used)[:, None], other=0.0)
        acc += tl.sum(b_part * tl.exp2(chunk_m - m)[:, None], 0)
    at_out = ((start + token).to(tl.int64) * (KV_HEADS * GROUP) + i_head) * D
    tl.store(out_ptr + at_out + o_d, (acc / total).to(out_ptr.dtype.element_ty))


def merge_parts(plan: AttentionPlan, paged: PagedPlan, splits: Splits, tiling: Tiling, out: Tensor) -> None:
    """Fill `out` [T, heads * D] of the short rows from what their parts left. Nothing to do for one part."""
    if splits.count == 1:
        return
    columns = min(tiling.dim, _MERGED_COLUMNS)
    _merge_kernel[(paged.num_short * paged.short_len, tiling.kv_heads * tiling.group, tiling.dim // columns)](
        partial_ptr=splits.partial,
        stats_ptr=splits.stats,
        query_starts_ptr=plan.query_starts,
        context_lens_ptr=plan.context_lens,
        out_ptr=out,
        num_splits=splits.count,
        fixed=splits.fixed,
        least=splits.least,
        row_tokens=paged.short_len,
        tiles=tiling.tiles,
        KV_HEADS=tiling.kv_heads,
        GROUP=tiling.group,
        D=tiling.dim,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        SPLITS=triton.next_power_of_2(splits.count),
        SLICE=columns,
        CHUNK=16,
        num_warps=1,
        **dependent(out),
    )
