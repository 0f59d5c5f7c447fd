"""The end of MLA's attention for a few tokens in one launch: parts of a context merged, then the heads' values.

Each program takes one token's head and some of its values; the up-projection is under way before it waits. For many
tokens merge_parts and mla_value read that weight once for all. Called by mla_attend on a card.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.attention_plan import AttentionPlan
from headrace.kernels.attention_split import Splits, Tiling, split_length
from headrace.kernels.dependent_launch import dependent, wait_and_release

_PARTS = 8  # read at a time
_COLUMNS = 32  # of a program


@triton.jit(do_not_specialize=["num_splits", "fixed", "least", "row_tokens", "tiles"])
def _merge_value_kernel(
    partial_ptr,  # [units, splits, BLOCK_M, C] float32
    stats_ptr,  # [units, splits, 2, BLOCK_M] float32
    latent_ptr,  # [T, H, C], of contexts that were not split
    value_up_ptr,  # [H, C, V]
    query_starts_ptr,
    context_lens_ptr,
    out_ptr,  # [T, H, V]
    num_splits,
    fixed,
    least,
    row_tokens,
    tiles,
    V,
    H: tl.constexpr,
    C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr,
    SPLITS: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    i_row = tl.program_id(0) // row_tokens
    token = tl.program_id(0) % row_tokens
    i_head = tl.program_id(1)
    start = tl.load(query_starts_ptr + i_row)
    end = tl.load(query_starts_ptr + i_row + 1)
    context = tl.load(context_lens_ptr + i_row)
    o_c = tl.arange(0, C)
    o_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    p_up = value_up_ptr + (i_head * C + o_c)[:, None] * V + o_v[None, :]
    b_up = tl.load(p_up, mask=(o_v < V)[None, :], other=0.0)
    wait_and_release(PDL)
    if token >= end - start:
        return
    head_at = (start + token).to(tl.int64) * H + i_head
    used = tl.cdiv(context, split_length(context, num_splits, fixed, least, BLOCK_N))
    if used > 1:
        query = token * H + i_head
        first = (i_row * tiles + query // BLOCK_M).to(tl.int64) * num_splits
        stats = stats_ptr + first * (2 * BLOCK_M) + query % BLOCK_M
        o_s = tl.arange(0, SPLITS)
        b_m = tl.load(stats + o_s * (2 * BLOCK_M), mask=o_s < used, other=float("-inf"))
        b_total = tl.load(stats + o_s * (2 * BLOCK_M) + BLOCK_M, mask=o_s < used, other=0.0)
        m = tl.max(b_m, 0)
        total = tl.sum(b_total * tl.exp2(b_m - m), 0)
        latent = tl.zeros([C], tl.float32)
        for s in range(0, used, PARTS):
            o_p = s + tl.arange(0, PARTS)
            part_m = tl.load(stats + o_p * (2 * BLOCK_M), mask=o_p < used, other=float("-inf"))
            at = (first + o_p) * BLOCK_M + query % BLOCK_M
            b_part = tl.load(
                partial_ptr + at[:, None] * C + o_c[None, :], mask=(o_p < used)[:, None], other=0.0
            )
            latent += tl.sum(b_part * tl.exp2(part_m - m)[:, None], 0)
        latent = latent / total
    else:
        latent = tl.load(latent_ptr + head_at * C + o_c).to(tl.float32)
    out = tl.sum(b_up.to(tl.float32) * latent[:, None], 0)
    tl.store(out_ptr + head_at * V + o_v, out.to(out_ptr.dtype.element_ty), mask=o_v < V)


def launch_merge_value(
    latent: Tensor, value_up: Tensor, plan: AttentionPlan, splits: Splits, tiling: Tiling
) -> Tensor:
    """Merge the short rows' parts, and bring them to the heads' values.

    Args:
        latent: [T, H, C], of the rows whose context is one part.
        value_up: [H, C, V].
        plan: all of its rows are short.
        splits: of the launch before, more than one.
        tiling: its.

    Returns:
        [T, H * V].
    """
    paged = plan.paged
    assert paged is not None and splits.count > 1, "nothing was divided"
    tokens, heads, rank = latent.shape
    width = value_up.shape[2]
    if not value_up.is_contiguous() or latent.dtype != value_up.dtype:
        raise ValueError(f"latent {latent.dtype}, value_up {value_up.dtype} {value_up.stride()}")
    out = torch.empty(tokens, heads * width, dtype=latent.dtype, device=latent.device)
    columns = min(triton.next_power_of_2(width), _COLUMNS)
    _merge_value_kernel[(paged.num_short * paged.short_len, heads, triton.cdiv(width, columns))](
        partial_ptr=splits.partial,
        stats_ptr=splits.stats,
        latent_ptr=latent,
        value_up_ptr=value_up,
        query_starts_ptr=plan.query_starts,
        context_lens_ptr=plan.context_lens,
        out_ptr=out,
        num_splits=splits.count,
        fixed=splits.fixed,
        least=splits.least,
        row_tokens=paged.short_len,
        tiles=tiling.tiles,
        V=width,
        H=heads,
        C=rank,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_V=columns,
        SPLITS=triton.next_power_of_2(splits.count),
        PARTS=_PARTS,
        num_warps=4,
        **dependent(latent),
    )
    return out
