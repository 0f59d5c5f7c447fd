"""MLA prefill with keys and values of every head: a third of the work of the latent form for long queries.

Gathers the latents of the long rows, expands them by one product, and attends. Called by mla_attend on a card.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.kernels.attention_plan import AttentionPlan
from headrace.kernels.gather_context import gather_context
from headrace.kernels.long_rows import find_tile
from headrace.kernels.mla_query_triton import turn
from headrace.kernels.online_softmax import LOG2_E, add_scores
from headrace.kernels.tuned import tuned

FEW_TOKENS = 2048  # of a step, up to which tiles of 64 queries keep more multiprocessors busy


@dataclass(frozen=True, slots=True)
class MlaPrefillTuning:
    """Launch choices of one shape."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    copies: bool = True  # keys and values come by the copy engine, as far as all queries see them
    max_registers: int | None = None  # of a thread


@triton.jit
def _attend(
    acc,
    m,
    total,
    b_q,
    b_q_turned,
    position,
    keys,
    values,
    turned,
    first,
    end,
    scale,
    kv_stride,
    turned_stride,
    MASKED: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Take positions first..end - 1 into the running result; without MASKED all queries see all of them."""
    o_k = tl.arange(0, N)
    o_r = tl.arange(0, R)
    o_v = tl.arange(0, V)
    for n in range(first, end, BLOCK_N):
        o_n = n + tl.arange(0, BLOCK_N)
        at = o_n.to(tl.int64) * kv_stride
        turned_at = o_n.to(tl.int64) * turned_stride
        if MASKED:
            within = o_n < end
            b_k = tl.load(keys + at[None, :] + o_k[:, None], mask=within[None, :], other=0.0)
            b_t = tl.load(turned + turned_at[None, :] + o_r[:, None], mask=within[None, :], other=0.0)
            b_v = tl.load(values + at[:, None] + o_v[None, :], mask=within[:, None], other=0.0)
        else:
            b_k = tl.load(keys + at[None, :] + o_k[:, None])
            b_t = tl.load(turned + turned_at[None, :] + o_r[:, None])
            b_v = tl.load(values + at[:, None] + o_v[None, :])
        scores = tl.dot(b_q, b_k, input_precision="ieee")
        scores = tl.dot(b_q_turned, b_t, scores, input_precision="ieee")
        if MASKED:
            scores = tl.where(o_n[None, :] > position[:, None], float("-inf"), scores)
        weights, decay, m, total = add_scores(scores, scale, m, total, 1)
        acc = tl.dot(weights.to(b_v.dtype), b_v, acc * decay[:, None], input_precision="ieee")
    return acc, m, total


@triton.jit
def _attend_copied(
    acc,
    m,
    total,
    b_q,
    b_q_turned,
    kv_desc,
    turned_desc,
    row,
    column,
    turned_column,
    end,
    scale,
    N: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """The same for positions 0..end - 1, a whole number of blocks that begin at `row`, all of them seen."""
    for n in range(0, end, BLOCK_N):
        b_k = kv_desc.load([row + n, column])
        b_t = turned_desc.load([row + n, turned_column])
        scores = tl.dot(b_q, b_k.T)
        scores = tl.dot(b_q_turned, b_t.T, scores)
        b_v = kv_desc.load([row + n, column + N])
        weights, decay, m, total = add_scores(scores, scale, m, total, 1)
        acc = tl.dot(weights.to(b_v.dtype), b_v, acc * decay[:, None])
    return acc, m, total


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _mla_prefill_kernel(
    q_ptr,  # [T, H, N + R], not yet rotated
    kv_ptr,  # [S, H, N + V]
    latents_ptr,  # [S, C + R]: the rotary keys are its last R columns
    kv_desc,  # [S, H * (N + V)] in blocks [BLOCK_N, N], N = V; None where not COPIES
    turned_desc,  # [S, C + R] in blocks [BLOCK_N, R]
    rotation_ptr,  # [T, R / 2, 2] float32
    query_starts_ptr,
    context_lens_ptr,
    starts_ptr,  # [long rows] int32
    out_ptr,  # [T, H, V]
    scale,  # of the scores, times log2(e)
    first_row,
    num_rows,
    q_stride_t,
    q_stride_h,
    H: tl.constexpr,
    N: tl.constexpr,
    R: tl.constexpr,
    V: tl.constexpr,
    C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    COPIES: tl.constexpr,
):
    i_head = tl.program_id(0)
    i_long, i_tile = find_tile(query_starts_ptr, first_row, num_rows, tl.program_id(1), BLOCK_M)
    if i_long < 0:
        return
    i_row = first_row + i_long
    start = tl.load(query_starts_ptr + i_row)
    num_tokens = tl.load(query_starts_ptr + i_row + 1) - start
    cached = tl.load(context_lens_ptr + i_row) - num_tokens
    token = i_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    rows = (token < num_tokens)[:, None]
    position = cached + token
    token_at = (start + token).to(tl.int64)
    p_q = q_ptr + (token_at * q_stride_t + i_head * q_stride_h)[:, None]
    b_q = tl.load(p_q + tl.arange(0, N)[None, :], mask=rows, other=0.0)

    o_r = tl.arange(0, R)[None, :]
    b_turning = tl.load(p_q + N + o_r, mask=rows, other=0.0).to(tl.float32)
    p_rotation = rotation_ptr + token_at[:, None] * R + o_r
    cos_sin = tl.load(p_rotation, mask=rows, other=0.0)
    b_q_turned = turn(b_turning, cos_sin, BLOCK_M, R, INTERLEAVED).to(b_q.dtype)

    row = tl.load(starts_ptr + i_long)
    first_key = row.to(tl.int64)
    keys = kv_ptr + (first_key * H + i_head) * (N + V)
    turned = latents_ptr + first_key * (C + R) + C
    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, V], tl.float32)
    seen_by_all = (cached + i_tile * BLOCK_M + 1) // BLOCK_N * BLOCK_N
    end = cached + tl.minimum((i_tile + 1) * BLOCK_M, num_tokens)
    if COPIES:
        acc, m, total = _attend_copied(
            acc, m, total, b_q, b_q_turned, kv_desc, turned_desc, row, i_head * (N + V), C, seen_by_all, scale,
            N, BLOCK_N,
        )  # fmt: skip
    else:
        acc, m, total = _attend(
            acc, m, total, b_q, b_q_turned, position, keys, keys + N, turned, 0, seen_by_all, scale,
            H * (N + V), C + R, False, N, R, V, BLOCK_N,
        )  # fmt: skip
    acc, m, total = _attend(
        acc, m, total, b_q, b_q_turned, position, keys, keys + N, turned, seen_by_all, end, scale,
        H * (N + V), C + R, True, N, R, V, BLOCK_N,
    )  # fmt: skip
    p_out = out_ptr + (token_at * H + i_head)[:, None] * V + tl.arange(0, V)[None, :]
    tl.store(p_out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=rows)


def mla_expanded(
    q: Tensor,
    cache: Tensor,
    up: Tensor,
    rotation: Tensor,
    plan: AttentionPlan,
    scale: float,
    interleaved: bool,
    out: Tensor,
    tuning: MlaPrefillTuning | None = None,
) -> None:
    """Fill `out` for the plan's long rows.

    Args:
        q: [T, H, N + R], not yet rotated; N, R and V are powers of two.
        cache: [blocks, block_size, C + R] of one layer.
        up: [H * (N + V), C], kv_b_proj.
        rotation: [T, 1, R / 2] complex64, see `rope`.
        plan: with its paged part.
        scale: factor of the scores.
        interleaved: see `rope`.
        out: [T, H * V], written for the tokens of long rows.
        tuning: None = by dtype.
    """
    paged = plan.paged
    assert paged is not None, "the plan was made for the CPU"
    heads, width = q.shape[1:]
    rank = up.shape[1]
    turning = cache.shape[2] - rank
    nope, value = width - turning, out.shape[1] // heads
    assert q.stride(2) == 1 and cache.is_contiguous() and out.is_contiguous(), f"q strides {q.stride()}"
    assert q.dtype == cache.dtype == up.dtype, f"q {q.dtype}, cache {cache.dtype}, up {up.dtype}"
    assert up.shape[0] == heads * (nope + value), (
        f"up {tuple(up.shape)} for {heads} heads of {nope} + {value}"
    )
    latents = gather_context(cache.unsqueeze(0), plan)[0]
    expanded = F.linear(latents[:, :rank], up)
    tuning = tuning or expanded_tuning(q, (nope, turning, value))
    copies = tuning.copies and nope == value
    _mla_prefill_kernel[(heads, triton.cdiv(q.shape[0], tuning.block_m) + paged.num_long)](
        q_ptr=q,
        kv_ptr=expanded,
        latents_ptr=latents,
        kv_desc=TensorDescriptor.from_tensor(expanded, [tuning.block_n, nope]) if copies else None,
        turned_desc=TensorDescriptor.from_tensor(latents, [tuning.block_n, turning]) if copies else None,
        rotation_ptr=torch.view_as_real(rotation),
        query_starts_ptr=plan.query_starts,
        context_lens_ptr=plan.context_lens,
        starts_ptr=paged.long_starts,
        out_ptr=out,
        scale=scale * LOG2_E,
        first_row=paged.num_short,
        num_rows=paged.num_long,
        q_stride_t=q.stride(0),
        q_stride_h=q.stride(1),
        H=heads,
        N=nope,
        R=turning,
        V=value,
        C=rank,
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        INTERLEAVED=interleaved,
        COPIES=copies,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        maxnreg=tuning.max_registers,
    )


def expanded_tuning(q: Tensor, dims: tuple[int, int, int]) -> MlaPrefillTuning:
    """As measured for (N, R, V); else small tiles for few tokens."""
    few = q.shape[0] <= FEW_TOKENS
    if (found := tuned("mla_expanded", q, (*dims, 0 if few else 1))) is not None:
        return MlaPrefillTuning(**found)
    if q.dtype is torch.float32:
        return MlaPrefillTuning(block_m=32, block_n=32, num_warps=4, num_stages=1, copies=False)
    if few:
        return MlaPrefillTuning(block_m=64, block_n=64, num_warps=4, num_stages=2)
    return MlaPrefillTuning(block_m=128, block_n=64, num_warps=8, num_stages=3, copies=False)
