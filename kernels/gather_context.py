"""Copies the paged contexts of a step's long rows into contiguous memory, one row after the other.

Attention over many queries reads a context many times: following the block table once is cheaper. Called by the
prefill kernels.
"""

import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention_plan import AttentionPlan
from headrace.kernels.long_rows import find_row

_POSITIONS = 16  # of a program


@triton.jit(do_not_specialize=["first_row", "num_rows", "table_stride", "out_plane_stride"])
def _gather_kernel(
    cache_ptr,  # [planes, blocks, BLOCK_SIZE, WIDTH]
    context_lens_ptr,
    tables_ptr,
    starts_ptr,  # [long rows] int32, where a row begins in out
    out_ptr,  # [planes, S, WIDTH]
    first_row,
    num_rows,
    plane_stride,
    block_stride,
    out_plane_stride,
    table_stride,
    BLOCK_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    i_plane = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    last = num_rows - 1
    if tl.program_id(0) * BLOCK_N < tl.load(starts_ptr + last) + tl.load(context_lens_ptr + first_row + last):
        row = find_row(starts_ptr, num_rows, place)
        o_n = place - tl.load(starts_ptr + row)
        here = o_n < tl.load(context_lens_ptr + first_row + row)
        o_w = tl.arange(0, BLOCK_W)
        within = here[:, None] & (o_w < WIDTH)[None, :]
        table = tables_ptr + (first_row + row).to(tl.int64) * table_stride
        block = tl.load(table + o_n // BLOCK_SIZE, mask=here, other=0).to(tl.int64)
        at = i_plane * plane_stride + block * block_stride + (o_n % BLOCK_SIZE) * WIDTH
        out_at = i_plane * out_plane_stride + place.to(tl.int64) * WIDTH
        b_rows = tl.load(cache_ptr + at[:, None] + o_w[None, :], mask=within)
        tl.store(out_ptr + out_at[:, None] + o_w[None, :], b_rows, mask=within)


def gather_context(cache: Tensor, plan: AttentionPlan) -> Tensor:
    """The long rows' contexts.

    Args:
        cache: [planes, blocks, block_size, W] of one layer; each block contiguous.
        plan: with its paged part; `long_context` is S.

    Returns:
        [planes, S, W].
    """
    paged = plan.paged
    assert paged is not None, "the plan was made for the CPU"
    planes, _, block_size, width = cache.shape
    assert cache.stride(2) == width and cache.stride(3) == 1, f"blocks are not contiguous: {cache.stride()}"
    out = cache.new_empty(planes, paged.long_context, width)
    _gather_kernel[(triton.cdiv(paged.long_context, _POSITIONS), planes)](
        cache_ptr=cache,
        context_lens_ptr=plan.context_lens,
        tables_ptr=plan.block_tables,
        starts_ptr=paged.long_starts,
        out_ptr=out,
        first_row=paged.num_short,
        num_rows=paged.num_long,
        plane_stride=cache.stride(0),
        block_stride=cache.stride(1),
        out_plane_stride=out.stride(0),
        table_stride=plan.block_tables.stride(0),
        BLOCK_SIZE=block_size,
        WIDTH=width,
        BLOCK_N=_POSITIONS,
        BLOCK_W=triton.next_power_of_2(width),
        num_warps=4,
    )
    return out
