"""MLA between its input and output projections: queries in, values of all heads out.

Chooses between the latent form, which reads little, and the expanded form, which computes little.
Called by the MLA layer, after the step's cache rows were written.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.attention_plan import AttentionPlan
from headrace.kernels.mla_attention import mla_attention, mla_attention_ref
from headrace.kernels.mla_query import mla_query, mla_query_ref
from headrace.kernels.mla_value import mla_value, mla_value_ref

FEW_TOKENS = 8  # that each read the values' up-projection for themselves


@dataclass(frozen=True, slots=True)
class MlaUp:
    """kv_b_proj in the shapes of its uses. H heads, N without position, latent C, values V."""

    key: Tensor  # [H, N, C]
    value: Tensor  # [H, C, V]
    both: Tensor  # [H * (N + V), C], as in the checkpoint


def mla_attend(
    q: Tensor,
    cache: Tensor,
    up: MlaUp,
    rotation: Tensor,
    plan: AttentionPlan,
    scale: float,
    interleaved: bool,
) -> Tensor:
    """Causal attention of each query token over its row's context.

    Args:
        q: [T, H, N + R], not yet rotated.
        cache: [blocks, block_size, C + R] of one layer.
        up: the layer's up-projections.
        rotation: [T, 1, R / 2] complex64, see `rope`.
        plan: the step's rows.
        scale: factor of the scores.
        interleaved: see `rope`.

    Returns:
        [T, H * V].
    """
    if plan.paged is not None and plan.paged.num_long and expansion_pays(q, up, plan.paged.long_len):
        return mla_attend_expanded(q, cache, up, rotation, plan, scale, interleaved)
    if q.is_cuda and q.shape[0] <= FEW_TOKENS and plan.paged is not None and not plan.paged.num_long:
        return mla_attend_few(q, cache, up, rotation, plan, scale, interleaved)
    queries = mla_query(q, up.key, rotation, interleaved)
    return mla_value(mla_attention(queries, cache, plan, scale, up.key.shape[2]), up.value)


def expansion_pays(q: Tensor, up: MlaUp, query_len: int) -> bool:
    """Whether so many query tokens of a row save more than the expansion of its context costs."""
    nope, rank = up.key.shape[1:]
    turning, value = q.shape[2] - nope, up.value.shape[2]
    if any(size < 16 or size & (size - 1) for size in (nope, turning, value)):
        return False
    return query_len * (2 * rank - nope - value) >= rank * (nope + value)


def mla_attend_few(
    q: Tensor,
    cache: Tensor,
    up: MlaUp,
    rotation: Tensor,
    plan: AttentionPlan,
    scale: float,
    interleaved: bool,
) -> Tensor:
    """The same for a few tokens of short rows, which take one launch less."""
    from headrace.kernels.mla_decode import mla_decode_parts
    from headrace.kernels.mla_merge_value import launch_merge_value
    from headrace.kernels.mla_query_triton import launch_mla_query
    from headrace.kernels.mla_value_triton import launch_mla_value

    assert plan.paged is not None and not plan.paged.num_long, "some rows are long"
    rank = up.key.shape[2]
    queries = launch_mla_query(q, up.key, rotation, interleaved)
    latent = torch.empty(*q.shape[:2], rank, dtype=q.dtype, device=q.device)
    splits, tiling = mla_decode_parts(queries, cache, plan, scale, rank, latent)
    if splits.count == 1:
        return launch_mla_value(latent, up.value)
    return launch_merge_value(latent, up.value, plan, splits, tiling)


def mla_attend_expanded(
    q: Tensor,
    cache: Tensor,
    up: MlaUp,
    rotation: Tensor,
    plan: AttentionPlan,
    scale: float,
    interleaved: bool,
) -> Tensor:
    """The same with the long rows' latents expanded. Short rows stay latent."""
    from headrace.kernels.mla_decode import mla_decode
    from headrace.kernels.mla_expanded import mla_expanded
    from headrace.kernels.mla_query_triton import launch_mla_query
    from headrace.kernels.mla_value_triton import launch_mla_value

    assert plan.paged is not None, "the plan was made for the CPU"
    short, (rank, value) = plan.paged.short_tokens, up.value.shape[1:]
    out = torch.empty(q.shape[0], q.shape[1] * value, dtype=q.dtype, device=q.device)
    if short:
        queries = launch_mla_query(q[:short], up.key, rotation[:short], interleaved)
        latent = torch.empty(short, q.shape[1], rank, dtype=q.dtype, device=q.device)
        mla_decode(queries, cache, plan, scale, rank, latent)
        out[:short] = launch_mla_value(latent, up.value)
    mla_expanded(q, cache, up.both, rotation, plan, scale, interleaved, out)
    return out


def mla_attend_ref(
    q: Tensor,
    cache: Tensor,
    up: MlaUp,
    rotation: Tensor,
    plan: AttentionPlan,
    scale: float,
    interleaved: bool,
) -> Tensor:
    queries = mla_query_ref(q.float(), up.key, rotation, interleaved)
    latent = mla_attention_ref(queries, cache, plan, scale, up.key.shape[2])
    return mla_value_ref(latent, up.value).to(q.dtype)
