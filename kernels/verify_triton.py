"""The choice of kernels/verify.py on a card: after sample_triton's launches, one that counts the drafts that stand.

Drafts with a distribution take two more: what each chunk of a rejected draft's row has left, and the token drawn
from it. No host synchronisation, and no shape that depends on what the tensors hold. Called by verify.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.sample_triton import CHUNK, launch_sample, weights_of

_BLOCK = 16  # query tokens of a row that are looked at together


@triton.jit
def _rest_of(p_logits, p_probs, offs, V, largest, temperature, cut, kept, ONE: tl.constexpr):
    """int64: kept weights, and what the drafter's share of `kept` leaves of them."""
    weights = weights_of(p_logits, offs, V, largest, temperature, ONE)
    weights = tl.where(weights >= cut, weights.to(tl.int64), 0)
    probs = tl.load(p_probs + offs, mask=offs < V, other=0.0)
    drafted = (probs.to(tl.float64) * kept.to(tl.float64)).to(tl.int64)
    return weights, tl.maximum(weights - drafted, 0), drafted


@triton.jit
def _rest_kernel(
    logits_ptr,
    drafts_ptr,  # [T] int64
    probs_ptr,  # [N, V] float32
    at_ptr,  # [T] int64
    temperature_ptr,
    accept_ptr,  # [T] int64
    tops_ptr,  # [T, C] float32
    cuts_ptr,  # [T] float32
    kept_ptr,  # [T] int64
    stands_ptr,  # [T] int32: 1 = the draft stands, 0 = it falls, -1 = it has no distribution
    rest_ptr,  # [T, C] int64
    V,
    C,
    logits_stride,
    probs_stride,
    ONE: tl.constexpr,
    CHUNK: tl.constexpr,
    C_BLOCK: tl.constexpr,
):
    """Whether a draft stands, and if not, what is left of each chunk."""
    i_c = tl.program_id(0)
    i_t = tl.program_id(1).to(tl.int64)
    draft = tl.load(drafts_ptr + i_t)
    at = tl.load(at_ptr + i_t)
    kept = tl.load(kept_ptr + i_t)
    stands = -1
    if (draft >= 0) & (at >= 0) & (kept > 0):
        offs_c = tl.arange(0, C_BLOCK)
        largest = tl.max(tl.load(tops_ptr + i_t * C + offs_c, mask=offs_c < C, other=float("-inf")), 0)
        temperature = tl.load(temperature_ptr + i_t)
        cut = tl.load(cuts_ptr + i_t)
        p_logits = logits_ptr + i_t * logits_stride
        p_probs = probs_ptr + at * probs_stride
        weight, _rest, drafted = _rest_of(p_logits, p_probs, draft, V, largest, temperature, cut, kept, ONE)
        passed = tl.load(accept_ptr + i_t).to(tl.float64) / ONE * drafted.to(tl.float64)
        stands = (passed < weight.to(tl.float64)).to(tl.int32)
        if stands == 0:
            offs = i_c * CHUNK + tl.arange(0, CHUNK)
            _weights, rest, _drafted = _rest_of(
                p_logits, p_probs, offs, V, largest, temperature, cut, kept, ONE
            )
            tl.store(rest_ptr + i_t * C + i_c, tl.sum(rest, 0))
    if i_c == 0:
        tl.store(stands_ptr + i_t, stands)


@triton.jit
def _redraw_kernel(
    logits_ptr,
    drafts_ptr,
    probs_ptr,
    at_ptr,
    temperature_ptr,
    sample_ptr,  # [T] int64
    tops_ptr,
    cuts_ptr,
    kept_ptr,
    stands_ptr,
    rest_ptr,
    tokens_ptr,  # [T] int64, the plain choices; overwritten
    V,
    C,
    logits_stride,
    probs_stride,
    ONE: tl.constexpr,
    CHUNK: tl.constexpr,
    C_BLOCK: tl.constexpr,
):
    """The token after one query token whose draft has a distribution."""
    i_t = tl.program_id(0).to(tl.int64)
    stands = tl.load(stands_ptr + i_t)
    if stands == 1:
        tl.store(tokens_ptr + i_t, tl.load(drafts_ptr + i_t))
    if stands == 0:
        offs_c = tl.arange(0, C_BLOCK)
        c_mask = offs_c < C
        rests = tl.load(rest_ptr + i_t * C + offs_c, mask=c_mask, other=0)
        total = tl.sum(rests, 0)
        # Nothing left: p is q but for rounding, and the plain choice stays.
        if total > 0:
            share = tl.load(sample_ptr + i_t).to(tl.float64) / ONE
            target = tl.minimum((share * total.to(tl.float64)).to(tl.int64), total - 1)
            chunk = tl.sum((c_mask & (tl.cumsum(rests, 0) <= target)).to(tl.int32), 0)
            before = tl.sum(tl.where(offs_c < chunk, rests, 0), 0)
            largest = tl.max(tl.load(tops_ptr + i_t * C + offs_c, mask=c_mask, other=float("-inf")), 0)
            offs = chunk * CHUNK + tl.arange(0, CHUNK)
            _weights, rest, _drafted = _rest_of(
                logits_ptr + i_t * logits_stride,
                probs_ptr + tl.load(at_ptr + i_t) * probs_stride,
                offs,
                V,
                largest,
                tl.load(temperature_ptr + i_t),
                tl.load(cuts_ptr + i_t),
                tl.load(kept_ptr + i_t),
                ONE,
            )
            passed = before + tl.cumsum(rest, 0)
            token = chunk * CHUNK + tl.sum((passed <= target).to(tl.int32), 0)
            tl.store(tokens_ptr + i_t, token.to(tl.int64))


@triton.jit
def _count_kernel(
    starts_ptr,  # [R + 1] int32
    drafts_ptr,
    tokens_ptr,
    stands_ptr,
    accepted_ptr,  # [R] int64
    STOCHASTIC: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """How many drafts of one row stand before the first that falls."""
    i_r = tl.program_id(0)
    start = tl.load(starts_ptr + i_r)
    end = tl.load(starts_ptr + i_r + 1)
    offs = tl.arange(0, BLOCK)
    first = end
    for block in range(start, end, BLOCK):
        i_t = block + offs
        mask = i_t < end
        draft = tl.load(drafts_ptr + i_t, mask=mask, other=-1)
        right = (draft >= 0) & (draft == tl.load(tokens_ptr + i_t, mask=mask, other=-1))
        if STOCHASTIC:
            # A draft that fell may still be drawn where nothing was left.
            right = right & (tl.load(stands_ptr + i_t, mask=mask, other=0) != 0)
        first = tl.minimum(first, tl.min(tl.where(mask & (right == 0), i_t, end), 0))
    tl.store(accepted_ptr + i_r, (first - start).to(tl.int64))


def launch_verify(
    logits: Tensor,
    query_starts: Tensor,
    drafts: Tensor,
    draft_probs: Tensor | None,
    draft_at: Tensor | None,
    rules: tuple[Tensor, Tensor, Tensor, Tensor],
    accept_uniform: Tensor,
    sample_uniform: Tensor,
    *,
    one: int,
    invalid: int,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor]:
    """As kernels.verify.verify_ref: tokens [T], accepted [R].

    Args:
        rules: temperature, top_k, top_p, min_p.
        one, invalid, chunk: as in launch_sample.
    """
    T, V = logits.shape
    R = query_starts.shape[0] - 1
    choice = launch_sample(logits, *rules, sample_uniform, one=one, invalid=invalid, chunk=chunk)
    tokens, C = choice.tokens, choice.tops.shape[1]
    accepted = torch.empty(R, dtype=torch.int64, device=logits.device)
    stands = tokens
    if draft_probs is not None:
        assert draft_at is not None
        if draft_probs.dtype is not torch.float32 or draft_probs.shape[1] != V or draft_probs.stride(1) != 1:
            raise ValueError(
                f"draft_probs: {draft_probs.dtype} {tuple(draft_probs.shape)}; expected float32 [N, {V}] rows"
            )
        stands = torch.empty(T, dtype=torch.int32, device=logits.device)
        given = {
            "logits_ptr": logits,
            "drafts_ptr": drafts,
            "probs_ptr": draft_probs,
            "at_ptr": draft_at,
            "temperature_ptr": rules[0],
            "tops_ptr": choice.tops,
            "cuts_ptr": choice.cuts,
            "kept_ptr": choice.kept,
            "stands_ptr": stands,
            "rest_ptr": torch.empty(T, C, dtype=torch.int64, device=logits.device),
            "V": V,
            "C": C,
            "logits_stride": logits.stride(0),
            "probs_stride": draft_probs.stride(0),
            "ONE": float(one),
            "CHUNK": chunk,
            "C_BLOCK": triton.next_power_of_2(C),
        }
        _rest_kernel[(C, T)](**given, accept_ptr=accept_uniform, num_warps=4)
        _redraw_kernel[(T,)](**given, sample_ptr=sample_uniform, tokens_ptr=tokens, num_warps=4)
    _count_kernel[(R,)](
        starts_ptr=query_starts,
        drafts_ptr=drafts,
        tokens_ptr=tokens,
        stands_ptr=stands,
        accepted_ptr=accepted,
        STOCHASTIC=draft_probs is not None,
        BLOCK=_BLOCK,
        num_warps=1,
    )
    return tokens, accepted
