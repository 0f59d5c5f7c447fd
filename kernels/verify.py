"""Which drafted tokens stand, and the token after them: speculative sampling that changes no distribution.

A draft with a distribution of its own is accepted or resampled by Leviathan et al. (arXiv 2211.17192) and Chen
et al. (arXiv 2302.01318); one without stands if the plain choice of kernels/sample.py is the same token, which is
that rule for a distribution of one token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace.kernels.sample import INVALID_TOKEN, ONE, invert, kept_weights, sample_ref


@dataclass(frozen=True, slots=True)
class Verified:
    """Row r emits tokens[query_starts[r] : query_starts[r] + accepted[r] + 1]; the others mean nothing."""

    tokens: Tensor  # [T] int64; INVALID_TOKEN where the logits held a NaN
    accepted: Tensor  # [R] int64


def verify_ref(
    logits: Tensor,
    query_starts: Tensor,
    drafts: Tensor,
    draft_probs: Tensor | None,
    draft_at: Tensor | None,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    accept_uniform: Tensor,
    sample_uniform: Tensor,
) -> Verified:
    """Choose the token after each query token, and count the drafts that stand.

    With p the distribution that `sample` would draw from and q the drafter's, a draft d stands where
    `accept_uniform` is below p(d) / q(d); else the token is drawn from what p has more than q. A row of one
    query token yields the bits of `sample`, and so does every row whose drafts have no q.

    Args:
        logits: [T, V] float32, everything but temperature and cuts applied.
        query_starts: [R + 1] int32: row r owns query tokens query_starts[r]..query_starts[r + 1] - 1; none for
            a padded row, whose count is 0. Query tokens of no row may follow.
        drafts: [T] int64: the token that the row's next query token holds; -1 at its last one.
        draft_probs: [N, V] float32, q of the stochastic drafts; each sums to 1. None = there are none.
        draft_at: [T] int64: the row of `draft_probs` that the draft was drawn from; -1 = it has no q.
        temperature, top_k, top_p, min_p: [T], as in sample_ref.
        accept_uniform: [T] int64 in 0..2**FRACTION_BITS - 1; independent of what drew the draft.
        sample_uniform: [T] int64 likewise, independent of both.
    """
    tokens = sample_ref(logits, temperature, top_k, top_p, min_p, sample_uniform)
    right = (tokens == drafts) & (drafts >= 0)
    if draft_probs is not None:
        assert draft_at is not None
        at = ((draft_at >= 0) & (drafts >= 0) & (temperature > 0) & (tokens != INVALID_TOKEN)).nonzero()[:, 0]
        weights = kept_weights(logits[at], temperature[at], top_k[at], top_p[at], min_p[at])
        total = weights.sum(-1, keepdim=True)
        drafted = (draft_probs[draft_at[at]].double() * total.double()).to(torch.int64)
        place = drafts[at].unsqueeze(-1)
        share = accept_uniform[at].double() / ONE
        stands = share * drafted.gather(-1, place)[:, 0].double() < weights.gather(-1, place)[:, 0].double()
        redrawn = invert(residual(weights, drafted), sample_uniform[at])
        tokens[at] = torch.where(stands, drafts[at], redrawn)
        right[at] = stands
    return Verified(tokens, leading(right, query_starts))


def verify(
    logits: Tensor,
    query_starts: Tensor,
    drafts: Tensor,
    draft_probs: Tensor | None,
    draft_at: Tensor | None,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    accept_uniform: Tensor,
    sample_uniform: Tensor,
) -> Verified:
    """See verify_ref; safe in a CUDA graph, whatever the tensors hold."""
    if logits.is_cuda:
        from headrace.kernels.verify_triton import launch_verify

        tokens, accepted = launch_verify(
            logits,
            query_starts,
            drafts,
            draft_probs,
            draft_at,
            (temperature, top_k, top_p, min_p),
            accept_uniform,
            sample_uniform,
            one=ONE,
            invalid=INVALID_TOKEN,
        )
        return Verified(tokens, accepted)
    return verify_ref(
        logits,
        query_starts,
        drafts,
        draft_probs,
        draft_at,
        temperature,
        top_k,
        top_p,
        min_p,
        accept_uniform,
        sample_uniform,
    )


def residual(weights: Tensor, drafted: Tensor) -> Tensor:
    """[S, V] int64 to draw from after a rejection: what the model gives a token beyond what the drafter gave it.

    Args:
        weights: [S, V] int64 of the model.
        drafted: [S, V] int64 of the drafter, with the same total but for rounding.
    """
    rest = (weights - drafted).clamp(min=0)
    # Nothing is left where the two are equal but for rounding; then a rejection is a rounding error too.
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, weights)


def leading(right: Tensor, query_starts: Tensor) -> Tensor:
    """[R] int64: how many of a row's query tokens, from its first on, are right, of [T] bool."""
    count = right.shape[0]
    wrong = torch.where(right, count, torch.arange(count, device=right.device))
    # The next wrong one from each query token on; a row ends with one.
    following = torch.cat((wrong.flip(0).cummin(0).values.flip(0), wrong.new_tensor([count])))
    starts, ends = query_starts[:-1].long(), query_starts[1:].long()
    return following[starts].minimum(ends) - starts
