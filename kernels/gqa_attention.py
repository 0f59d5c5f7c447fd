"""Grouped-query attention over the paged cache of keys and values.

Called by the GQA layer, after the step's keys and values were written.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.attention_plan import AttentionPlan, DecodeGroup, PrefillRow


def gqa_attention(q: Tensor, cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """Causal attention of each query token over its row's context.

    Args:
        q: [T, Hq, D], normed and rotated; head h reads key-value head h // (Hq / Hkv).
        cache: [2, blocks, block_size, Hkv, D] of one layer: keys, values.
        plan: the step's rows.
        scale: factor of the scores.

    Returns:
        [T, Hq * D].
    """
    if q.is_cuda:
        return gqa_attention_paged(q, cache, plan, scale)
    if not plan.prefills and len(plan.decodes) == 1:
        return _decode(q, cache, plan.decodes[0], scale)
    out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
    for group in plan.decodes:
        assert group.rows is not None, "a group that is not the whole step names its rows"
        out.index_copy_(0, group.rows, _decode(q.index_select(0, group.rows), cache, group, scale))
    for row in plan.prefills:
        out[row.start : row.end] = _prefill(q[row.start : row.end], cache, row, scale)
    return out


def gqa_attention_paged(q: Tensor, cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    """The same by the device kernels: one launch for the short rows, one for the long ones."""
    from headrace.kernels.gqa_decode import gqa_decode
    from headrace.kernels.gqa_prefill import gqa_prefill

    assert plan.paged is not None, "the plan was made for the CPU"
    out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
    if plan.paged.num_short:
        gqa_decode(q, cache, plan, scale, out)
    if plan.paged.num_long:
        gqa_prefill(q, cache, plan, scale, out)
    return out


def _decode(q: Tensor, cache: Tensor, group: DecodeGroup, scale: float) -> Tensor:
    """[G * Q, Hq, D] -> [G * Q, Hq * D]. A row's query heads of one key-value head are the queries of one call."""
    heads, dim = cache.shape[3:]
    stored = cache if group.first_cell is not None else cache.index_select(1, group.block_ids)
    if group.padding is not None:
        # A cell that nobody wrote may hold NaN, and 0 * NaN would reach the sum.
        stored.view(2, -1, heads, dim).index_fill_(1, group.padding, 0.0)
    rows = stored.view(2, group.num_rows, -1, heads, dim).narrow(2, group.first_cell or 0, group.length)
    keys, values = rows.transpose(2, 3).unbind(0)
    mask = group.mask.unsqueeze(1).to(q.dtype) if group.mask.numel() > 1 else None
    if group.num_queries == 1:
        queries = q.view(group.num_rows, heads, -1, dim)
        return F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale).flatten(1)
    shared = q.shape[1] // heads
    queries = q.view(group.num_rows, -1, heads, shared, dim).transpose(1, 2)
    assert mask is not None, "several query tokens of a row never see the same"
    out = F.scaled_dot_product_attention(
        queries.reshape(group.num_rows, heads, -1, dim),
        keys,
        values,
        attn_mask=mask.repeat_interleave(shared, 2),
        scale=scale,
    )
    return out.view(queries.shape).transpose(1, 2).reshape(q.shape[0], -1)


def _prefill(q: Tensor, cache: Tensor, row: PrefillRow, scale: float) -> Tensor:
    """[n, Hq, D] -> [n, Hq * D]."""
    n, heads, dim = q.shape[0], cache.shape[3], cache.shape[4]
    stored = cache.index_select(1, row.block_ids).view(2, -1, heads, dim)[:, : row.length]
    # Key-value heads are the batch, query heads of one of them the heads: shared by stride, not by copy.
    group = q.shape[1] // heads
    keys, values = stored.transpose(1, 2).unsqueeze(2).expand(-1, -1, group, -1, -1).unbind(0)
    queries = q.view(n, heads, group, dim).permute(1, 2, 0, 3)
    mask = None if row.mask is None else row.mask.to(q.dtype)
    out = F.scaled_dot_product_attention(
        queries, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return out.permute(2, 0, 1, 3).reshape(n, -1)


def gqa_attention_ref(q: Tensor, cache: Tensor, plan: AttentionPlan, scale: float) -> Tensor:
    out = q.new_empty(q.shape[0], q.shape[1] * q.shape[2])
    starts, block_size, heads = plan.query_starts.tolist(), cache.shape[2], cache.shape[3]
    for row, length in enumerate(plan.context_lens.tolist()):
        for token in range(starts[row], starts[row + 1]):
            visible = length - (starts[row + 1] - 1 - token)
            table = plan.block_tables[row, : -(-visible // block_size)].long()
            keys, values = cache[:, table].flatten(1, 2)[:, :visible].float()
            grouped = q[token].float().view(heads, -1, q.shape[-1])
            weights = (torch.einsum("hgd,lhd->hgl", grouped, keys) * scale).softmax(-1)
            out[token] = torch.einsum("hgl,lhd->hgd", weights, values).flatten().to(q.dtype)
    return out
