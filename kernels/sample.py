"""Choose one token per row: temperature, min-p, top-k, top-p, then the inverse of the distribution function.

A row's choice depends on its own logits and its own uniform number only, so batch-mates never change it.
Probabilities are fixed-point integers, so no order of summation can change it either.
"""

import numpy as np
import torch
from torch import Tensor

from headrace.kernels.random_uniform import FRACTION_BITS

INVALID_TOKEN = -1  # the row had a NaN
ONE = 1 << FRACTION_BITS  # weight of the likeliest token


def sample_ref(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    """Sample from softmax(logits / temperature), cut to the kept tokens and renormalised.

    The cuts follow each other: min_p (probability at least min_p times the largest), top_k (the k likeliest),
    top_p (the fewest likeliest whose mass reaches top_p of what is left). Tokens that tie with the last one
    kept are kept. Temperature 0 takes the likeliest token, the lowest id among equals.

    Args:
        logits: [S, V] float32; -inf = never chosen.
        temperature: [S] float32, 0 = greedy.
        top_k: [S] int64, 0 = off.
        top_p: [S] float32 in (0, 1], 1 = off.
        min_p: [S] float32 in [0, 1), 0 = off.
        uniform: [S] int64 in 0..2**FRACTION_BITS - 1.

    Returns:
        [S] int64 token ids; INVALID_TOKEN where a row holds a NaN.
    """
    largest, greedy = logits.max(dim=-1)
    invalid = torch.isnan(largest)
    if bool((temperature == 0).all()):
        return torch.where(invalid, INVALID_TOKEN, greedy)
    chosen = invert(kept_weights(logits, temperature, top_k, top_p, min_p), uniform)
    chosen = torch.where(temperature == 0, greedy, chosen)
    return torch.where(invalid, INVALID_TOKEN, chosen)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor
) -> Tensor:
    """See sample_ref. A card's exponential may differ by a unit in the last place of a float32."""
    if logits.is_cuda:
        from headrace.kernels.sample_triton import launch_sample

        return launch_sample(
            logits, temperature, top_k, top_p, min_p, uniform, one=ONE, invalid=INVALID_TOKEN
        ).tokens
    return sample_ref(logits, temperature, top_k, top_p, min_p, uniform)


def kept_weights(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[S, V] int64: what sample_ref draws in proportion to; 0 = cut. Temperature 0 counts as 1."""
    divisor = torch.where(temperature == 0, 1.0, temperature)
    largest = logits.max(dim=-1, keepdim=True).values
    scaled = (logits - largest) / divisor.unsqueeze(-1)
    weights = _weights(scaled)
    cut = (min_p.double() * ONE).ceil().to(torch.int64).clamp(min=1)
    if bool(((top_k > 0) | (top_p < 1)).any()):
        cut = _raise_cut(_weights(_sorted_descending(scaled)), cut, top_k, top_p)
    return torch.where(weights >= cut.unsqueeze(-1), weights, 0)


def invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first token at which the running weight passes `uniform`'s share of the row's total.

    Args:
        weights: [S, V] int64, with a total of at least 1 in each row; weight 0 is never chosen.
        uniform: [S] int64 in 0..2**FRACTION_BITS - 1.

    Returns:
        [S] int64 token ids.
    """
    running = weights.cumsum(dim=-1)
    total = running[:, -1]
    target = (uniform.double() / ONE * total.double()).to(torch.int64).minimum(total - 1)
    # A row of NaN has no total; its answer is replaced by the caller and only has to be a valid index.
    return torch.searchsorted(running, target.unsqueeze(-1), right=True).squeeze(-1)


def _weights(scaled: Tensor) -> Tensor:
    """[S, V] int64 from logits whose row maximum is 0: probability relative to the likeliest token's."""
    return (scaled.exp() * ONE).nan_to_num(0.0).to(torch.int64)


def _raise_cut(ordered: Tensor, cut: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[S] int64: the least weight to keep, from a least weight and the weights in descending order [S, V]."""
    kth = ordered.gather(-1, (top_k - 1).clamp(0, ordered.shape[-1] - 1).unsqueeze(-1)).squeeze(-1)
    cut = torch.where(top_k > 0, cut.maximum(kth), cut)
    kept = torch.where(ordered >= cut.unsqueeze(-1), ordered, 0)
    running = kept.cumsum(dim=-1)
    wanted = top_p.double() * running[:, -1].double()
    nucleus = ((running - kept).double() < wanted.unsqueeze(-1)) & (kept > 0)
    last = (nucleus.sum(dim=-1) - 1).clamp(min=0)
    lowest = ordered.gather(-1, last.unsqueeze(-1)).squeeze(-1)
    return torch.where(top_p < 1, cut.maximum(lowest), cut)


def _sorted_descending(values: Tensor) -> Tensor:
    if values.device.type == "cpu":
        # numpy sorts a row more than ten times faster than torch does on a CPU.
        ascending = torch.from_numpy(np.sort(values.numpy(), axis=-1))
        return ascending.flip(-1)
    return values.sort(dim=-1, descending=True).values
