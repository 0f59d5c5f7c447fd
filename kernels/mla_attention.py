"""Attention over the paged latent cache with absorbed weights: all heads read one row a token.

Called by the MLA layer, after the step's rows were written.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.kernels.attention_plan import AttentionPlan, DecodeGroup, PrefillRow


def mla_attention(q: Tensor, cache: Tensor, plan: AttentionPlan, scale: float, rank: int) -> Tensor:
    """Causal attention of each query token over its row's context.

    Args:
        q: [T, H, C + R] from `mla_query`.
        cache: [blocks, block_size, C + R] of one layer.
        plan: the step's rows.
        scale: factor of the scores.
        rank: C; the values are the first C numbers of a cache row.

    Returns:
        [T, H, C].
    """
    if q.is_cuda:
        return mla_attention_paged(q, cache, plan, scale, rank)
    if not plan.prefills and len(plan.decodes) == 1:
        return _decode(q, cache, plan.decodes[0], scale, rank)
    out = q.new_empty(q.shape[0], q.shape[1], rank)
    for group in plan.decodes:
        assert group.rows is not None, "a group that is not the whole step names its rows"
        out.index_copy_(0, group.rows, _decode(q.index_select(0, group.rows), cache, group, scale, rank))
    for row in plan.prefills:
        out[row.start : row.end] = _prefill(q[row.start : row.end], cache, row, scale, rank)
    return out


def mla_attention_paged(q: Tensor, cache: Tensor, plan: AttentionPlan, scale: float, rank: int) -> Tensor:
    """The same by the device kernels: one launch for the short rows, one for the long ones."""
    from headrace.kernels.mla_decode import mla_decode, mla_prefill

    assert plan.paged is not None, "the plan was made for the CPU"
    out = q.new_empty(q.shape[0], q.shape[1], rank)
    if plan.paged.num_short:
        mla_decode(q, cache, plan, scale, rank, out)
    if plan.paged.num_long:
        mla_prefill(q, cache, plan, scale, rank, out)
    return out


def _decode(q: Tensor, cache: Tensor, group: DecodeGroup, scale: float, rank: int) -> Tensor:
    """[G * Q, H, C + R] -> [G * Q, H, C]. The heads of a row's tokens are the queries of one product."""
    heads, width = q.shape[1:]
    mask = group.mask
    if group.num_queries > 1:
        mask = mask.repeat_interleave(heads, 1)
    if group.num_rows == 1 and q.dtype is torch.float32:
        # One row needs no batch; a plain product costs half as much to start as a batched one.
        stored = cache if group.first_cell is not None else cache.index_select(0, group.block_ids)
        own = stored.view(-1, width).narrow(0, group.first_cell or 0, group.length)
        visible = 1 if group.num_queries > 1 else 0
        scores = torch.addmm(mask[0], q.reshape(-1, width), own.t(), beta=visible, alpha=scale)
        return torch.mm(scores.softmax(-1), own.narrow(1, 0, rank)).view(-1, heads, rank)
    stored = cache.index_select(0, group.block_ids)
    if group.padding is not None:
        # A cell that nobody wrote may hold NaN, and 0 * NaN would reach the sum.
        stored.view(-1, width).index_fill_(0, group.padding, 0.0)
    keys = stored.view(group.num_rows, -1, width).narrow(1, 0, group.length)
    queries = q.reshape(group.num_rows, -1, width)
    if q.dtype is torch.float32:
        weights = torch.baddbmm(mask, queries, keys.transpose(1, 2), alpha=scale).softmax(-1)
    else:
        scores = torch.baddbmm(mask.to(q.dtype), queries, keys.transpose(1, 2), alpha=scale)
        weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    return torch.bmm(weights, keys.narrow(2, 0, rank)).view(-1, heads, rank)


def _prefill(q: Tensor, cache: Tensor, row: PrefillRow, scale: float, rank: int) -> Tensor:
    """[n, H, C + R] -> [n, H, C]."""
    heads, width = q.shape[1:]
    keys = cache.index_select(0, row.block_ids).view(-1, width)[: row.length].expand(1, heads, -1, -1)
    mask = None if row.mask is None else row.mask.to(q.dtype)
    # The fused operation wants values as wide as keys: the surplus columns are dropped.
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1).unsqueeze(0), keys, keys, attn_mask=mask, is_causal=mask is None, scale=scale
    )
    return out[0, ..., :rank].transpose(0, 1)


def mla_attention_ref(q: Tensor, cache: Tensor, plan: AttentionPlan, scale: float, rank: int) -> Tensor:
    out = q.new_empty(q.shape[0], q.shape[1], rank)
    starts, block_size = plan.query_starts.tolist(), cache.shape[1]
    for row, length in enumerate(plan.context_lens.tolist()):
        for token in range(starts[row], starts[row + 1]):
            visible = length - (starts[row + 1] - 1 - token)
            table = plan.block_tables[row, : -(-visible // block_size)].long()
            keys = cache[table].flatten(0, 1)[:visible].float()
            weights = (q[token].float() @ keys.T * scale).softmax(-1)
            out[token] = (weights @ keys[:, :rank]).to(q.dtype)
    return out
