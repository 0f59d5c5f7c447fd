"""Attention of rows with many query tokens: tiles of queries, one head each, over gathered keys and values.

Positions are taken from 0 on in blocks of one size, so that a token's result depends on neither chunking nor
batch-mates (FlashAttention-2, arXiv 2307.08691). Called by gqa_attention on a card.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from headrace.kernels.attention_plan import AttentionPlan
from headrace.kernels.gather_context import gather_context
from headrace.kernels.long_rows import find_tile
from headrace.kernels.online_softmax import LOG2_E, add_scores
from headrace.kernels.tuned import tuned

FEW_TOKENS = 1024  # of a step, up to which tiles of 64 queries keep more multiprocessors busy


@dataclass(frozen=True, slots=True)
class GqaPrefillTuning:
    """Launch choices of one shape."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    max_registers: int | None = None  # of a thread
    copies: bool = True  # keys and values come by the copy engine, as far as all queries see them


@triton.jit
def _attend(
    acc,
    m,
    total,
    b_q,
    position,
    keys,
    values,
    first,
    end,
    scale,
    MASKED: tl.constexpr,
    TOKEN: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Take positions first..end - 1 into the running result; without MASKED all queries see all of them."""
    o_d = tl.arange(0, D)
    for n in range(first, end, BLOCK_N):
        o_n = n + tl.arange(0, BLOCK_N)
        at = o_n.to(tl.int64) * TOKEN
        if MASKED:
            within = o_n < end
            b_k = tl.load(keys + at[None, :] + o_d[:, None], mask=within[None, :], other=0.0)
            scores = tl.dot(b_q, b_k, input_precision="ieee")
            scores = tl.where(o_n[None, :] > position[:, None], float("-inf"), scores)
            # What lies behind the context may be NaN, which no weight of 0 would cancel.
            b_v = tl.load(values + at[:, None] + o_d[None, :], mask=within[:, None], other=0.0)
        else:
            b_k = tl.load(keys + at[None, :] + o_d[:, None])
            scores = tl.dot(b_q, b_k, input_precision="ieee")
            b_v = tl.load(values + at[:, None] + o_d[None, :])
        weights, decay, m, total = add_scores(scores, scale, m, total, 1)
        acc = tl.dot(weights.to(b_v.dtype), b_v, acc * decay[:, None], input_precision="ieee")
    return acc, m, total


@triton.jit
def _attend_copied(
    acc, m, total, b_q, keys_desc, values_desc, row, column, end, scale, BLOCK_N: tl.constexpr
):
    """The same for positions 0..end - 1, a whole number of blocks that begin at `row`, all of them seen."""
    for n in range(0, end, BLOCK_N):
        b_k = keys_desc.load([row + n, column])
        scores = tl.dot(b_q, b_k.T)
        b_v = values_desc.load([row + n, column])
        weights, decay, m, total = add_scores(scores, scale, m, total, 1)
        acc = tl.dot(weights.to(b_v.dtype), b_v, acc * decay[:, None])
    return acc, m, total


@triton.jit(do_not_specialize=["first_row", "num_rows"])
def _gqa_prefill_kernel(
    q_ptr,  # [T, Hq, D]
    keys_ptr,  # [S, Hkv, D]
    values_ptr,
    keys_desc,  # [S, Hkv * D] in blocks [BLOCK_N, D]; None where not COPIES
    values_desc,
    query_starts_ptr,
    context_lens_ptr,
    starts_ptr,  # [long rows] int32
    out_ptr,  # [T, Hq, D]
    scale,  # of the scores, times log2(e)
    first_row,
    num_rows,
    q_stride_t,
    q_stride_h,
    out_stride_t,
    GROUP: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
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
    rows = token < num_tokens
    position = cached + token
    o_d = tl.arange(0, D)
    token_at = (start + token).to(tl.int64)
    p_q = q_ptr + (token_at * q_stride_t + i_head * q_stride_h)[:, None] + o_d[None, :]
    b_q = tl.load(p_q, mask=rows[:, None], other=0.0)
    first_key = tl.load(starts_ptr + i_long)
    column = (i_head // GROUP) * D
    at = first_key.to(tl.int64) * (HKV * D) + column

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    seen_by_all = (cached + i_tile * BLOCK_M + 1) // BLOCK_N * BLOCK_N
    end = cached + tl.minimum((i_tile + 1) * BLOCK_M, num_tokens)
    if COPIES:
        acc, m, total = _attend_copied(
            acc, m, total, b_q, keys_desc, values_desc, first_key, column, seen_by_all, scale, BLOCK_N
        )
    else:
        acc, m, total = _attend(
            acc, m, total, b_q, position, keys_ptr + at, values_ptr + at, 0, seen_by_all, scale,
            False, HKV * D, D, BLOCK_N,
        )  # fmt: skip
    acc, m, total = _attend(
        acc, m, total, b_q, position, keys_ptr + at, values_ptr + at, seen_by_all, end, scale,
        True, HKV * D, D, BLOCK_N,
    )  # fmt: skip
    p_out = out_ptr + (token_at * out_stride_t + i_head * D)[:, None] + o_d[None, :]
    tl.store(p_out, (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=rows[:, None])


def gqa_prefill(
    q: Tensor,
    cache: Tensor,
    plan: AttentionPlan,
    scale: float,
    out: Tensor,
    tuning: GqaPrefillTuning | None = None,
) -> None:
    """Fill `out` for the plan's long rows. Arguments as of `gqa_decode`."""
    paged = plan.paged
    assert paged is not None, "the plan was made for the CPU"
    heads, dim = cache.shape[3:]
    assert q.dtype == cache.dtype == out.dtype, f"q {q.dtype}, cache {cache.dtype}, out {out.dtype}"
    assert q.stride(2) == cache.stride(4) == out.stride(1) == 1, "the last dimension must be contiguous"
    assert dim >= 16 and dim & (dim - 1) == 0, f"head dimension {dim} is no power of two from 16"
    tuning = tuning or prefill_tuning(q, dim)
    keys, values = gather_context(cache.flatten(3), plan).unbind(0)
    block = [tuning.block_n, dim]
    _gqa_prefill_kernel[(q.shape[1], triton.cdiv(q.shape[0], tuning.block_m) + paged.num_long)](
        q_ptr=q,
        keys_ptr=keys,
        values_ptr=values,
        keys_desc=TensorDescriptor.from_tensor(keys, block) if tuning.copies else None,
        values_desc=TensorDescriptor.from_tensor(values, block) if tuning.copies else None,
        query_starts_ptr=plan.query_starts,
        context_lens_ptr=plan.context_lens,
        starts_ptr=paged.long_starts,
        out_ptr=out,
        scale=scale * LOG2_E,
        first_row=paged.num_short,
        num_rows=paged.num_long,
        q_stride_t=q.stride(0),
        q_stride_h=q.stride(1),
        out_stride_t=out.stride(0),
        GROUP=q.shape[1] // heads,
        HKV=heads,
        D=dim,
        BLOCK_M=tuning.block_m,
        BLOCK_N=tuning.block_n,
        COPIES=tuning.copies,
        num_warps=tuning.num_warps,
        num_stages=tuning.num_stages,
        maxnreg=tuning.max_registers,
    )


def prefill_tuning(q: Tensor, dim: int) -> GqaPrefillTuning:
    """As measured; else small tiles for few tokens, and for many two programs on a multiprocessor.

    One program's softmax then runs beside the other's products.
    """
    few = q.shape[0] <= FEW_TOKENS
    if (found := tuned("gqa_prefill", q, (dim, 0 if few else 1))) is not None:
        return GqaPrefillTuning(**found)
    if q.dtype is torch.float32:
        return GqaPrefillTuning(block_m=32, block_n=32, num_warps=4, num_stages=2, copies=False)
    if few:
        return GqaPrefillTuning(block_m=64, block_n=64, num_warps=4, num_stages=2)
    if dim == 128:
        return GqaPrefillTuning(block_m=128, block_n=64, num_warps=8, num_stages=2, max_registers=128)
    # Other sums take more registers of a thread, or fewer: none is counted on.
    return GqaPrefillTuning(block_m=128, block_n=64, num_warps=8 if dim > 128 else 4, num_stages=2)
