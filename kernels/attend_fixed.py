"""Attention over a paged cache whose result for a token depends on that token and its context alone.

A context is cut into parts of one length from position 0 on; each is summed by itself, and they are merged in order,
by one program or by a launch of its own: the same unfused operations, so the same bits. One kernel for a decode, a
draft's rows and every chunk of a prompt, over grouped heads or MLA's latents. Called by fixed.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention_plan import AttentionPlan
from headrace.kernels.online_softmax import LOG2_E, add_scores
from headrace.kernels.paged_plan import PagedPlan

PART = 256  # positions
_MERGED_COLUMNS = 128


@dataclass(frozen=True, slots=True)
class _Tiles:
    """Shape of a tile: the same for every launch of one model, or bits would differ."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


@triton.jit
def _merge(m, total, acc, part_m, part_total, part_acc):
    """Take a part into the running maximum (base 2), sum of weights [M] and weighted sum [M, D]."""
    m_new = tl.maximum(m, part_m)
    # A query that has seen nothing yet would subtract infinities.
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    kept = tl.exp2(m - m_safe)
    taken = tl.exp2(part_m - m_safe)
    return m_new, total * kept + part_total * taken, acc * kept[:, None] + part_acc * taken[:, None]


@triton.jit(do_not_specialize=["first_row", "tiles", "max_parts", "table_stride"])
def _attend_fixed_kernel(
    q_ptr,  # [T, HQ, D + R]
    keys_ptr,  # [blocks, BLOCK_SIZE, HKV, D + R]
    values_ptr,  # [blocks, BLOCK_SIZE, HKV, D]
    query_starts_ptr,
    context_lens_ptr,
    tables_ptr,
    out_ptr,  # [T, HQ, D]
    partial_ptr,  # [tiles, max_parts, BLOCK_M, D] float32 where SPLIT
    stats_ptr,  # [tiles, max_parts, 2, BLOCK_M] float32 where SPLIT
    scale,  # of the scores, times log2(e)
    first_row,
    tiles,  # of a row and key-value head
    max_parts,
    q_stride_t,
    q_stride_h,
    block_stride,
    token_stride,
    head_stride,
    table_stride,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,  # columns of queries and keys behind the first D; 0 = none
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PART: tl.constexpr,
    SPLIT: tl.constexpr,
):
    i_head = tl.program_id(1)
    i_row = first_row + tl.program_id(0) // tiles
    # The last tiles see most: they start first.
    i_tile = tiles - 1 - tl.program_id(0) % tiles
    start = tl.load(query_starts_ptr + i_row)
    num_tokens = tl.load(query_starts_ptr + i_row + 1) - start
    context = tl.load(context_lens_ptr + i_row)
    if i_tile * BLOCK_M >= num_tokens * GROUP:
        return
    o_m = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    token = o_m // GROUP
    head = i_head * GROUP + o_m % GROUP
    rows = token < num_tokens
    visible = tl.minimum(context - num_tokens + token + 1, context)
    end = tl.minimum(context, context - num_tokens + ((i_tile + 1) * BLOCK_M - 1) // GROUP + 1)

    o_d = tl.arange(0, D)
    token_at = (start + token).to(tl.int64)
    p_q = q_ptr + (token_at * q_stride_t + head * q_stride_h)[:, None]
    b_q = tl.load(p_q + o_d[None, :], mask=rows[:, None], other=0.0)
    if R > 0:
        o_r = D + tl.arange(0, R)
        b_q_rest = tl.load(p_q + o_r[None, :], mask=rows[:, None], other=0.0)
    table = tables_ptr + i_row.to(tl.int64) * table_stride
    all_m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    all_total = tl.zeros([BLOCK_M], tl.float32)
    all_acc = tl.zeros([BLOCK_M, D], tl.float32)
    for part in range(tl.program_id(2), tl.cdiv(end, PART), tl.num_programs(2)):
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, D], tl.float32)
        for n in range(part * PART, tl.minimum((part + 1) * PART, end), BLOCK_N):
            o_n = n + tl.arange(0, BLOCK_N)
            within = o_n < end
            block = tl.load(table + o_n // BLOCK_SIZE, mask=within, other=0).to(tl.int64)
            at = block * block_stride + (o_n % BLOCK_SIZE) * token_stride + i_head * head_stride
            # Unwritten cells may hold NaN, which no weight of 0 would cancel: they are read as 0.
            b_k = tl.load(keys_ptr + at[:, None] + o_d[None, :], mask=within[:, None], other=0.0)
            scores = tl.dot(b_q, tl.trans(b_k), input_precision="ieee")
            if R > 0:
                b_rest = tl.load(keys_ptr + at[None, :] + o_r[:, None], mask=within[None, :], other=0.0)
                scores = tl.dot(b_q_rest, b_rest, scores, input_precision="ieee")
                b_v = b_k
            else:
                b_v = tl.load(values_ptr + at[:, None] + o_d[None, :], mask=within[:, None], other=0.0)
            scores = tl.where(o_n[None, :] >= visible[:, None], float("-inf"), scores)
            weights, decay, m, total = add_scores(scores, scale, m, total, 1)
            acc = tl.dot(weights.to(b_v.dtype), b_v, acc * decay[:, None], input_precision="ieee")
        if SPLIT:
            i_part = ((i_row - first_row) * tiles + i_tile) * tl.num_programs(1) + i_head
            i_part = i_part.to(tl.int64) * max_parts + part
            o_part = i_part * BLOCK_M + tl.arange(0, BLOCK_M)
            tl.store(partial_ptr + o_part[:, None] * D + o_d[None, :], acc, mask=rows[:, None])
            p_stats = stats_ptr + i_part * (2 * BLOCK_M) + tl.arange(0, BLOCK_M)
            tl.store(p_stats, m, mask=rows)
            tl.store(p_stats + BLOCK_M, total, mask=rows)
        else:
            all_m, all_total, all_acc = _merge(all_m, all_total, all_acc, m, total, acc)
    if not SPLIT:
        p_out = out_ptr + (token_at * (tl.num_programs(1) * GROUP) + head)[:, None] * D + o_d[None, :]
        # A row without context gets zeros.
        out = all_acc / tl.where(all_total == 0.0, 1.0, all_total)[:, None]
        tl.store(p_out, out.to(out_ptr.dtype.element_ty), mask=rows[:, None])


@triton.jit(do_not_specialize=["first_row", "row_tokens", "tiles", "max_parts"])
def _merge_kernel(
    partial_ptr,
    stats_ptr,
    query_starts_ptr,
    context_lens_ptr,
    out_ptr,  # [T, HQ, D]
    first_row,
    row_tokens,
    tiles,
    max_parts,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PART: tl.constexpr,
    SLICE: tl.constexpr,
):
    i_row = tl.program_id(0) // row_tokens
    token = tl.program_id(0) % row_tokens
    i_head = tl.program_id(1)
    heads = tl.num_programs(1)
    start = tl.load(query_starts_ptr + first_row + i_row)
    num_tokens = tl.load(query_starts_ptr + first_row + i_row + 1) - start
    if token >= num_tokens:
        return
    visible = tl.load(context_lens_ptr + first_row + i_row) - num_tokens + token + 1
    query = token * GROUP + i_head % GROUP
    tile = (i_row * tiles + query // BLOCK_M) * (heads // GROUP) + i_head // GROUP
    o_m = query % BLOCK_M + tl.arange(0, 1)
    o_d = tl.program_id(2) * SLICE + tl.arange(0, SLICE)
    m = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    acc = tl.zeros([1, SLICE], tl.float32)
    for part in range(tl.cdiv(visible, PART)):
        i_part = tile.to(tl.int64) * max_parts + part
        p_stats = stats_ptr + i_part * (2 * BLOCK_M) + o_m
        at = (i_part * BLOCK_M + o_m)[:, None] * D + o_d[None, :]
        m, total, acc = _merge(
            m, total, acc, tl.load(p_stats), tl.load(p_stats + BLOCK_M), tl.load(partial_ptr + at)
        )
    out = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    p_out = out_ptr + ((start + token).to(tl.int64) * heads + i_head) * D + o_d[None, :]
    tl.store(p_out, out.to(out_ptr.dtype.element_ty))


def attend_fixed(
    q: Tensor, keys: Tensor, values: Tensor, plan: AttentionPlan, scale: float, split: bool | None = None
) -> Tensor:
    """Causal attention of each query token over its row's context.

    Args:
        q: [T, Hq, D + R], the last dimension contiguous; head h reads key-value head h // (Hq / Hkv).
        keys: [blocks, block_size, Hkv, D + R] of one layer; R is not 0 only where values are keys: MLA's latents.
        values: [blocks, block_size, Hkv, D], strides as of keys.
        plan: with its paged part.
        scale: factor of the scores.
        split: whether parts go to programs of their own; None = where the card would lie idle. It moves no bit.

    Returns:
        [T, Hq, D].
    """
    paged = plan.paged
    assert paged is not None, "the plan was made for the CPU"
    dim = values.shape[3]
    assert q.dtype == keys.dtype == values.dtype, f"q {q.dtype}, keys {keys.dtype}, values {values.dtype}"
    assert q.stride(2) == keys.stride(3) == 1 and keys.stride() == values.stride(), "strides do not fit"
    for size in (dim, keys.shape[3] - dim):
        assert size == 0 or (size >= 16 and size & (size - 1) == 0), f"{size} is no power of two from 16"
    out = torch.empty(q.shape[0], q.shape[1], dim, dtype=q.dtype, device=q.device)
    # Few and many query tokens apart, or the grid of the many would hold empty programs for each of the few.
    if paged.num_short:
        _launch(q, keys, values, plan, paged, scale, out, 0, paged.num_short, paged.short_len, split)
    if paged.num_long:
        _launch(
            q, keys, values, plan, paged, scale, out, paged.num_short, paged.num_long, paged.long_len, split
        )
    return out


def _launch(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    paged: PagedPlan,
    scale: float,
    out: Tensor,
    first_row: int,
    num_rows: int,
    row_tokens: int,
    split: bool | None,
) -> None:
    kv_heads, (heads, dim) = keys.shape[2], out.shape[1:]
    group, shape = heads // kv_heads, _tiles(q.dtype, dim)
    tiles = triton.cdiv(group * row_tokens, shape.block_m)
    programs, max_parts = num_rows * tiles * kv_heads, triton.cdiv(paged.capacity, PART)
    if split is None:
        split = max_parts > 1 and programs <= paged.num_sms
    parts = programs * max_parts * shape.block_m if split else 0
    partial = torch.empty(parts * dim, dtype=torch.float32, device=q.device)
    stats = torch.empty(parts * 2, dtype=torch.float32, device=q.device)
    shared = {
        "partial_ptr": partial,
        "stats_ptr": stats,
        "query_starts_ptr": plan.query_starts,
        "context_lens_ptr": plan.context_lens,
        "out_ptr": out,
        "first_row": first_row,
        "tiles": tiles,
        "max_parts": max_parts,
        "GROUP": group,
        "D": dim,
        "BLOCK_M": shape.block_m,
        "PART": PART,
        # A product and a sum that one kernel fuses and the other does not would differ in the last bit.
        "enable_fp_fusion": False,
    }
    at_once = min(max_parts, max(1, 2 * paged.num_sms // programs)) if split else 1
    _attend_fixed_kernel[(num_rows * tiles, kv_heads, at_once)](
        **shared,
        q_ptr=q,
        keys_ptr=keys,
        values_ptr=values,
        tables_ptr=plan.block_tables,
        scale=scale * LOG2_E,
        q_stride_t=q.stride(0),
        q_stride_h=q.stride(1),
        block_stride=keys.stride(0),
        token_stride=keys.stride(1),
        head_stride=keys.stride(2),
        table_stride=plan.block_tables.stride(0),
        R=keys.shape[3] - dim,
        BLOCK_SIZE=keys.shape[1],
        BLOCK_N=shape.block_n,
        SPLIT=split,
        num_warps=shape.num_warps,
        num_stages=shape.num_stages,
    )
    if split:
        columns = min(dim, _MERGED_COLUMNS)
        _merge_kernel[(num_rows * row_tokens, heads, dim // columns)](
            **shared, row_tokens=row_tokens, SLICE=columns, num_warps=1
        )


def _tiles(dtype: torch.dtype, dim: int) -> _Tiles:
    """Two sums of a tile must fit the registers: its running one and the part's."""
    if dtype is torch.float32:
        return _Tiles(block_m=16, block_n=16 if dim > 128 else 32, num_warps=4, num_stages=1)
    if dim > 128:
        return _Tiles(block_m=32, block_n=32, num_warps=8, num_stages=3)
    return _Tiles(block_m=64, block_n=64, num_warps=4, num_stages=3)
