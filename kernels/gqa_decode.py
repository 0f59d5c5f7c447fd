"""Attention of rows with few query tokens over paged keys and values, the context split among programs.

The query heads of one key-value head and the row's tokens form one tile. Called by gqa_attention on a card.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention_plan import AttentionPlan
from headrace.kernels.attention_split import Tiling, make_splits, merge_parts, split_length, store_part
from headrace.kernels.dependent_launch import dependent, wait_and_release
from headrace.kernels.online_softmax import LOG2_E, add_scores


@dataclass(frozen=True, slots=True)
class GqaDecodeTuning:
    """Launch choices of one shape."""

    block_n: int
    num_warps: int
    num_stages: int
    min_split: int = 32  # positions that a part is worth
    programs_per_sm: int = 2
    max_registers: int | None = None  # of a thread; fewer let more programs share a multiprocessor


@triton.jit(do_not_specialize=["num_splits", "fixed", "least", "tiles", "table_stride"])
def _gqa_decode_kernel(
    q_ptr,  # [T, Hq, D]
    keys_ptr,  # [blocks, BLOCK_SIZE, Hkv, D]
    values_ptr,
    query_starts_ptr,
    context_lens_ptr,
    tables_ptr,
    out_ptr,  # [T, Hq, D]
    partial_ptr,
    stats_ptr,
    scale,  # of the scores, times log2(e)
    q_stride_t,
    q_stride_h,
    out_stride_t,
    block_stride,
    token_stride,
    head_stride,
    table_stride,
    num_splits,
    fixed,
    least,
    tiles,  # of a row and key-value head
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    i_head = tl.program_id(0)
    i_split = tl.program_id(1)
    i_row = tl.program_id(2) // tiles
    i_tile = tl.program_id(2) % tiles
    start = tl.load(query_starts_ptr + i_row)
    num_tokens = tl.load(query_starts_ptr + i_row + 1) - start
    context = tl.load(context_lens_ptr + i_row)
    wait_and_release(PDL)
    if i_tile * BLOCK_M >= num_tokens * GROUP:
        return
    length = split_length(context, num_splits, fixed, least, BLOCK_N)
    first = i_split * length
    # A row without context still gets zeros.
    if (first >= context) & (i_split > 0):
        return
    o_m = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = o_m // GROUP
    head = i_head * GROUP + o_m % GROUP
    rows = token < num_tokens
    visible = context - num_tokens + token + 1
    tile_visible = tl.minimum(context, context - num_tokens + ((i_tile + 1) * BLOCK_M - 1) // GROUP + 1)
    end = tl.minimum(first + length, tile_visible)

    o_d = tl.arange(0, D)
    token_at = (start + token).to(tl.int64)
    p_q = q_ptr + (token_at * q_stride_t + head * q_stride_h)[:, None] + o_d[None, :]
    b_q = tl.trans(tl.load(p_q, mask=rows[:, None], other=0.0))
    table = tables_ptr + i_row.to(tl.int64) * table_stride
    keys = keys_ptr + i_head * head_stride
    values = values_ptr + i_head * head_stride
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # Positions come first: they fill a tensor core's tile, which the few queries would not.
    acc = tl.zeros([D, BLOCK_M], tl.float32)
    for n in range(first, end, BLOCK_N):
        o_n = n + tl.arange(0, BLOCK_N)
        within = o_n < end
        block = tl.load(table + o_n // BLOCK_SIZE, mask=within, other=0).to(tl.int64)
        at = block * block_stride + (o_n % BLOCK_SIZE) * token_stride
        b_k = tl.load(keys + at[:, None] + o_d[None, :], mask=within[:, None], other=0.0)
        scores = tl.dot(b_k, b_q, input_precision="ieee")
        hidden = o_n[:, None] >= tl.minimum(visible, end)[None, :]
        scores = tl.where(hidden, float("-inf"), scores)
        weights, decay, m, total = add_scores(scores, scale, m, total, 0)
        # Unwritten slots may hold NaN, which no weight of 0 would cancel.
        b_v = tl.load(values + at[:, None] + o_d[None, :], mask=within[:, None], other=0.0)
        acc = tl.dot(tl.trans(b_v), weights.to(b_v.dtype), acc * decay[None, :], input_precision="ieee")

    store_part(
        tl.trans(acc),
        m,
        total,
        rows,
        out_ptr + token_at * out_stride_t + head * D,
        partial_ptr,
        stats_ptr,
        ((i_row * tiles + i_tile) * tl.num_programs(0) + i_head) * num_splits + i_split,
        context <= length,
        BLOCK_M,
        D,
    )


def gqa_decode(
    q: Tensor,
    cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    out: Tensor,
    tuning: GqaDecodeTuning | None = None,
) -> None:
    """Fill `out` for the plan's short rows.

    Args:
        q: [T, Hq, D], the last dimension contiguous.
        cache: [2, blocks, block_size, Hkv, D] of one layer.
        plan: with its paged part.
        scale: factor of the scores.
        out: [T, Hq * D], written for the tokens of short rows.
        tuning: None = by dtype and load.
    """
    paged = plan.paged
    assert paged is not None, "the plan was made for the CPU"
    _, _, block_size, heads, dim = cache.shape
    group = q.shape[1] // heads
    _check(q, cache, out)
    largest = 16 if q.dtype is torch.float32 else 64
    block_m = max(16, min(largest, triton.next_power_of_2(group * paged.short_len)))
    tiles = triton.cdiv(group * paged.short_len, block_m)
    tuning = tuning or _tuning(q.dtype, few=4 * paged.num_short * tiles * heads <= paged.num_sms)
    tiling = Tiling(tiles, heads, group, block_m, tuning.block_n, dim)
    splits = make_splits(paged, tiling, tuning.min_split, tuning.programs_per_sm)
    _gqa_decode_kernel[(heads, splits.count, paged.num_short * tiling.tiles)](
        q_ptr=q,
        keys_ptr=cache[0],
        values_ptr=cache[1],
        query_starts_ptr=plan.query_starts,
        context_lens_ptr=plan.context_lens,
        tables_ptr=plan.block_tables,
        out_ptr=out,
        partial_ptr=splits.partial,
        stats_ptr=splits.stats,
        scale=scale * LOG2_E,
        q_stride_t=q.stride(0),
        q_stride_h=q.stride(1),
        out_stride_t=out.stride(0),
        block_stride=cache.stride(1),
        token_stride=cache.stride(2),
        head_stride=cache.stride(3),
        table_stride=plan.block_tables.stride(0),
        num_splits=splits.count,
        fixed=splits.fixed,
        least=splits.least,
        tiles=tiling.tiles,
        GROUP=group,
        BLOCK_SIZE=block_size,
        D=dim,
        BLOCK_M=block_m,
        BLOCK_N=tuning.block_n,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        maxnreg=tuning.max_registers,
        **dependent(q),
    )
    merge_parts(plan, paged, splits, tiling, out)


def _tuning(dtype: torch.dtype, *, few: bool) -> GqaDecodeTuning:
    """By dtype, and by whether the tiles are far too few to fill the card: short pipelines start sooner."""
    if dtype is torch.float32:
        return GqaDecodeTuning(block_n=32, num_warps=4, num_stages=2)
    return GqaDecodeTuning(block_n=64, num_warps=4, num_stages=3 if few else 5)


def _check(q: Tensor, cache: Tensor, out: Tensor) -> None:
    heads, dim = cache.shape[3:]
    assert q.dtype == cache.dtype == out.dtype, f"q {q.dtype}, cache {cache.dtype}, out {out.dtype}"
    assert q.stride(2) == cache.stride(4) == out.stride(1) == 1, "the last dimension must be contiguous"
    assert dim >= 16 and dim & (dim - 1) == 0, f"head dimension {dim} is no power of two from 16"
    assert q.shape[1] % heads == 0, f"{q.shape[1]} query heads over {heads} key-value heads"
    assert out.shape == (q.shape[0], q.shape[1] * dim), f"out is {tuple(out.shape)}"
