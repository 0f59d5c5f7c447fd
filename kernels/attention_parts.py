"""Division of contexts among programs that each attend to some tiles of positions, and the merge of their results.

Work is one line of tiles, unit after unit (a row's queries of one key-value head), cut into equal shares: a program
may end one unit and begin the next (FlashMLA's scheme, github.com/deepseek-ai/FlashMLA). Or each unit is cut by
itself into parts of a fixed size. Parts are merged in order, so timing never changes a sum. Used by the decode kernels.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention_plan import AttentionPlan
from headrace.kernels.dependent_launch import dependent, wait_and_release
from headrace.kernels.paged_plan import PagedPlan

_MERGED_COLUMNS = 32  # of a program that merges
_MERGED_PARTS = 8  # that it reads at a time


@dataclass(frozen=True, slots=True)
class Tiling:
    """How queries are laid out: `tiles` of BLOCK_M for each row and key-value head, GROUP heads a token."""

    rows: int
    tiles: int  # of a row
    kv_heads: int
    group: int
    block_m: int
    block_n: int  # positions of a tile
    dim: int  # D of the result

    @property
    def units(self) -> int:
        """Of one key-value head."""
        return self.rows * self.tiles


@dataclass(frozen=True, slots=True)
class Parts:
    """`programs` share all tiles evenly; or, where `fixed`, each unit is cut into `count` parts of `fixed` tiles."""

    programs: int
    fixed: int
    count: int
    sums: Tensor  # [parts, BLOCK_M, D] float32, not yet divided
    stats: Tensor  # [parts, 2, BLOCK_M] float32: maximum (base 2), sum of weights

    @property
    def grid(self) -> tuple[int, int]:
        return (self.programs, self.count)


def make_parts(plan: PagedPlan, tiling: Tiling, programs_per_sm: int) -> Parts:
    """Divide the short rows' contexts: by the plan's split size, else evenly."""
    units = tiling.units * tiling.kv_heads
    if plan.split_size is None:
        programs = programs_per_sm * plan.num_sms
        # A program cuts at most the unit it begins in and the one it ends in.
        return _allocate(programs, 0, 1, 2 * programs, tiling, plan.device)
    if plan.split_size % tiling.block_n:
        raise ValueError(f"split_size: {plan.split_size} is no multiple of {tiling.block_n}")
    count = -(-plan.capacity // plan.split_size)
    parts = units * count if count > 1 else 0
    return _allocate(units, plan.split_size // tiling.block_n, count, parts, tiling, plan.device)


def whole_contexts(plan: PagedPlan, tiling: Tiling) -> Parts:
    """No division."""
    fixed = -(-plan.capacity // tiling.block_n)
    return _allocate(tiling.units * tiling.kv_heads, fixed, 1, 0, tiling, plan.device)


def _allocate(
    programs: int, fixed: int, count: int, parts: int, tiling: Tiling, device: torch.device
) -> Parts:
    shape = (parts, tiling.block_m)
    return Parts(
        programs=programs,
        fixed=fixed,
        count=count,
        sums=torch.empty(*shape, tiling.dim, dtype=torch.float32, device=device),
        stats=torch.empty(*shape, 2, dtype=torch.float32, device=device),
    )


def units_block(tiling: Tiling) -> int:
    """Few sizes, so that few kernels are compiled."""
    block = 16
    while block < tiling.units:
        block *= 4
    return block


@triton.jit
def unit_tiles(
    query_starts_ptr,
    context_lens_ptr,
    units,
    end,
    first_row,
    tiles,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Tiles of positions that each unit sees; 0 beyond `end` and where there is no query. Units: a block of numbers."""
    row = first_row + units // tiles
    i_tile = units % tiles
    here = units < end
    start = tl.load(query_starts_ptr + row, mask=here, other=0)
    num_tokens = tl.load(query_starts_ptr + row + 1, mask=here, other=0) - start
    context = tl.load(context_lens_ptr + row, mask=here, other=0)
    last = ((i_tile + 1) * BLOCK_M - 1) // GROUP
    seen = tl.minimum(context, context - num_tokens + last + 1)
    # A row without context still gets zeros.
    return tl.where(here & (i_tile * BLOCK_M < num_tokens * GROUP), tl.maximum(tl.cdiv(seen, BLOCK_N), 1), 0)


@triton.jit
def share_of(total, programs):
    """Tiles of a program."""
    return tl.cdiv(total, programs)


@triton.jit
def locate(counts, ends, units, at, HEADS: tl.constexpr):
    """Unit, head, tile within the unit, and tiles of the unit, where place `at` of the line of tiles lies."""
    unit = tl.sum((ends * HEADS <= at).to(tl.int32), 0)
    count = tl.sum(tl.where(units == unit, counts, 0), 0)
    within = at - (tl.sum(tl.where(units == unit, ends, 0), 0) - count) * HEADS
    return unit, within // count, within % count, count


@triton.jit
def store_part(
    acc,  # [BLOCK_M, D]
    m,
    total,
    rows,  # [BLOCK_M], which queries exist
    out_rows,  # [BLOCK_M] pointers, where their results begin
    sums_ptr,
    stats_ptr,
    i_part,
    whole,  # the part is the unit
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
):
    """Write a unit's result, or keep what `merge_parts` needs of it."""
    o_m = tl.arange(0, BLOCK_M)
    o_d = tl.arange(0, D)
    if whole:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_rows[:, None] + o_d[None, :], acc.to(out_rows.dtype.element_ty), mask=rows[:, None])
    else:
        at = i_part.to(tl.int64) * BLOCK_M + o_m
        tl.store(sums_ptr + at[:, None] * D + o_d[None, :], acc, mask=rows[:, None])
        tl.store(stats_ptr + at * 2, m, mask=rows)
        tl.store(stats_ptr + at * 2 + 1, total, mask=rows)


@triton.jit(do_not_specialize=["units", "tiles", "programs", "fixed", "count"])
def _merge_kernel(
    sums_ptr,
    stats_ptr,
    query_starts_ptr,
    context_lens_ptr,
    out_ptr,  # [T, HEADS * GROUP, D]
    units,
    tiles,
    programs,
    fixed,
    count,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_U: tl.constexpr,
    SLICE: tl.constexpr,
    CHUNK: tl.constexpr,
    FIXED: tl.constexpr,
    PDL: tl.constexpr,
):
    unit = tl.program_id(0) // HEADS
    i_head = tl.program_id(0) % HEADS
    i_row = unit // tiles
    start = tl.load(query_starts_ptr + i_row)
    num_tokens = tl.load(query_starts_ptr + i_row + 1) - start
    o_u = tl.arange(0, BLOCK_U)
    counts = unit_tiles(query_starts_ptr, context_lens_ptr, o_u, units, 0, tiles, GROUP, BLOCK_M, BLOCK_N)
    own = tl.sum(tl.where(o_u == unit, counts, 0), 0)
    if FIXED:
        num_parts = tl.cdiv(own, fixed)
        first_part = tl.program_id(0) * count
    else:
        share = share_of(tl.sum(counts, 0) * HEADS, programs)
        first = tl.sum(tl.where(o_u < unit, counts, 0), 0) * HEADS + i_head * own
        first_program = first // tl.maximum(share, 1)
        num_parts = tl.where(own > 0, (first + own - 1) // tl.maximum(share, 1) - first_program + 1, 0)
        first_part = 2 * first_program
    wait_and_release(PDL)
    if num_parts > 1:
        o_m = (unit % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
        rows = o_m // GROUP < num_tokens
        o_d = tl.program_id(1) * SLICE + tl.arange(0, SLICE)
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, SLICE], tl.float32)
        for i in range(0, num_parts, CHUNK):
            o_p = i + tl.arange(0, CHUNK)
            # A program has two places; of the one that begins a unit, the second holds the part.
            part = first_part + (o_p if FIXED else 2 * o_p + (o_p == 0).to(tl.int32))
            at = part.to(tl.int64)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
            mask = (o_p < num_parts)[:, None] & rows[None, :]
            b_m = tl.load(stats_ptr + at * 2, mask=mask, other=float("-inf"))
            b_total = tl.load(stats_ptr + at * 2 + 1, mask=mask, other=0.0)
            b_sums = tl.load(
                sums_ptr + at[:, :, None] * D + o_d[None, None, :], mask=mask[:, :, None], other=0.0
            )
            m_new = tl.maximum(m, tl.max(b_m, 0))
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            weights = tl.exp2(b_m - m_safe[None, :])
            decay = tl.exp2(m - m_safe)
            total = total * decay + tl.sum(b_total * weights, 0)
            acc = acc * decay[:, None] + tl.sum(b_sums * weights[:, :, None], 0)
            m = m_new
        token_at = (start + o_m // GROUP).to(tl.int64) * (HEADS * GROUP)
        p_out = out_ptr + (token_at + i_head * GROUP + o_m % GROUP)[:, None] * D + o_d[None, :]
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(p_out, acc.to(out_ptr.dtype.element_ty), mask=rows[:, None])


def merge_parts(plan: AttentionPlan, parts: Parts, tiling: Tiling, out: Tensor) -> None:
    """Fill `out` [T, heads * D] of the short rows from what their parts left."""
    if parts.fixed and parts.count == 1:
        return
    columns = min(tiling.dim, _MERGED_COLUMNS)
    _merge_kernel[(tiling.units * tiling.kv_heads, tiling.dim // columns)](
        sums_ptr=parts.sums,
        stats_ptr=parts.stats,
        query_starts_ptr=plan.query_starts,
        context_lens_ptr=plan.context_lens,
        out_ptr=out,
        units=tiling.units,
        tiles=tiling.tiles,
        programs=parts.programs,
        fixed=parts.fixed,
        count=parts.count,
        HEADS=tiling.kv_heads,
        GROUP=tiling.group,
        D=tiling.dim,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_U=units_block(tiling),
        SLICE=columns,
        CHUNK=_MERGED_PARTS,
        FIXED=parts.fixed > 0,
        num_warps=4,
        **dependent(out),
    )
