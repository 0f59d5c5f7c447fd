"""Division of a context among programs that each attend to a part, and the merge of their results.

The last program to arrive at a tile merges it, in the order of the parts: one launch, and a sum that does not
depend on timing (flash-decoding, crfm.stanford.edu/2023/10/12/flashdecoding.html). Used by the decode kernels.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.paged_plan import PagedPlan

MAX_SPLITS = 64
_PROGRAMS_PER_SM = 2


@dataclass(frozen=True, slots=True)
class Splits:
    """`count` programs a tile; each takes `size` positions, or an equal share where `size` is 0."""

    count: int
    size: int
    partial: Tensor  # [tiles, count, BLOCK_M, D] float32, sums not yet divided
    stats: Tensor  # [tiles, count, 2, BLOCK_M] float32: maximum (base 2), sum of weights


def make_splits(plan: PagedPlan, tiles: int, shape: tuple[int, int], min_size: int) -> Splits:
    """Fill the card, with parts of at least `min_size` positions.

    Args:
        plan: of the step.
        tiles: independent pieces of work.
        shape: (BLOCK_M, D) of a tile's result.
        min_size: below this the merge costs more than the split gains.
    """
    if plan.split_size is None:
        useful = min(-(-plan.capacity // min_size), MAX_SPLITS)
        count, size = max(1, min(-(-_PROGRAMS_PER_SM * plan.num_sms // tiles), useful)), 0
    else:
        count, size = -(-plan.capacity // plan.split_size), plan.split_size
    assert count == 1 or tiles <= plan.counters.numel(), f"{tiles} tiles for {plan.counters.numel()} counters"
    kept = tiles * count if count > 1 else 0
    device = plan.counters.device
    return Splits(
        count=count,
        size=size,
        partial=torch.empty(kept * shape[0] * shape[1], dtype=torch.float32, device=device),
        stats=torch.empty(kept * 2 * shape[0], dtype=torch.float32, device=device),
    )


@triton.jit
def split_length(context, num_splits, fixed_size, MIN_SIZE: tl.constexpr):
    """Positions of one part; a multiple of MIN_SIZE."""
    share = tl.cdiv(tl.cdiv(context, num_splits), MIN_SIZE) * MIN_SIZE
    return tl.where(fixed_size > 0, fixed_size, tl.maximum(share, MIN_SIZE))


@triton.jit
def add_scores(scores, m, total):
    """Take [M, N] scores (base 2, -inf = hidden) into running maximum and sum: weights, decay, maximum, sum."""
    m_new = tl.maximum(m, tl.max(scores, 1))
    # A row that has seen nothing yet would subtract infinities.
    m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    weights = tl.exp2(scores - m_safe[:, None])
    decay = tl.exp2(m - m_safe)
    return weights, decay, m_new, total * decay + tl.sum(weights, 1)


@triton.jit
def finish_part(
    acc,
    m,
    total,
    out_rows,
    rows,
    partial_ptr,
    stats_ptr,
    counters_ptr,
    i_tile,
    i_split,
    num_splits,
    used,
    BLOCK_M: tl.constexpr,
    D: tl.constexpr,
):
    """Write a tile's result, or keep a part of it and let the last of `used` parts merge them.

    `rows` [BLOCK_M] says which rows exist, `out_rows` [BLOCK_M] where each begins.
    """
    o_d = tl.arange(0, D)
    if used == 1:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        p_out = out_rows[:, None] + o_d[None, :]
        tl.store(p_out, acc.to(out_rows.dtype.element_ty), mask=rows[:, None])
    else:
        o_m = tl.arange(0, BLOCK_M)
        first = i_tile.to(tl.int64) * num_splits
        partial = partial_ptr + first * (BLOCK_M * D)
        stats = stats_ptr + first * (2 * BLOCK_M)
        p_partial = partial + i_split * (BLOCK_M * D) + o_m[:, None] * D + o_d[None, :]
        tl.store(p_partial, acc, mask=rows[:, None])
        p_stats = stats + i_split * (2 * BLOCK_M) + o_m
        tl.store(p_stats, m, mask=rows)
        tl.store(p_stats + BLOCK_M, total, mask=rows)
        # All threads' stores must come before the one atomic that publishes them.
        tl.debug_barrier()
        arrived = tl.atomic_add(counters_ptr + i_tile, 1, sem="acq_rel", scope="gpu")
        if arrived == used - 1:
            tl.store(counters_ptr + i_tile, 0)
            _merge_parts(partial, stats, out_rows, rows, used, BLOCK_M, D)


@triton.jit
def _merge_parts(partial, stats, out_rows, rows, used, BLOCK_M: tl.constexpr, D: tl.constexpr):
    """[used, BLOCK_M, D] parts -> out. In slices of a few parts and columns, to stay within the registers."""
    SLICE: tl.constexpr = min(D, 64)
    CHUNK: tl.constexpr = max(1, 8192 // (BLOCK_M * SLICE))
    o_m = tl.arange(0, BLOCK_M)
    for d in tl.static_range(0, D, SLICE):
        o_d = d + tl.arange(0, SLICE)
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, SLICE], tl.float32)
        for s in range(0, used, CHUNK):
            o_s = s + tl.arange(0, CHUNK)
            here = (o_s < used)[:, None] & rows[None, :]
            p_m = stats + o_s[:, None] * (2 * BLOCK_M) + o_m[None, :]
            # Past the L1 cache, which may hold what a previous call left there.
            b_m = tl.load(p_m, mask=here, other=float("-inf"), cache_modifier=".cg")
            b_total = tl.load(p_m + BLOCK_M, mask=here, other=0.0, cache_modifier=".cg")
            p_part = (
                partial + o_s[:, None, None] * (BLOCK_M * D) + o_m[None, :, None] * D + o_d[None, None, :]
            )
            b_part = tl.load(p_part, mask=here[:, :, None], other=0.0, cache_modifier=".cg")
            m_new = tl.maximum(m, tl.max(b_m, 0))
            m_safe = tl.where(m_new == float("-inf"), 0.0, m_new)
            weights = tl.exp2(b_m - m_safe[None, :])
            decay = tl.exp2(m - m_safe)
            total = total * decay + tl.sum(b_total * weights, 0)
            acc = acc * decay[:, None] + tl.sum(b_part * weights[:, :, None], 0)
            m = m_new
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(out_rows[:, None] + o_d[None, :], acc.to(out_rows.dtype.element_ty), mask=rows[:, None])
