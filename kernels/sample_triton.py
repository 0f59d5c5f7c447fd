"""The choice of kernels/sample.py on a card: one program a row, no sort, no host synchronisation.

The least weight to keep is searched by bisection over the weights' float32 patterns: over the whole row until few
enough lie between the bounds, then over those alone, held in registers. Called by sample.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 8192
_HELD = 8192


@triton.jit
def _weights_at(p_logits, start, offs, V, largest, divisor, ONE: tl.constexpr):
    """Float32 weights of some tokens, 0 beyond the row; their integer parts are the weights proper."""
    b_logits = tl.load(p_logits + start + offs, mask=start + offs < V, other=float("-inf"))
    weights = tl.exp((b_logits - largest) / divisor) * ONE
    return tl.where(weights == weights, weights, 0.0)


@triton.jit
def _measure(p_logits, V, largest, divisor, cut, ONE: tl.constexpr, BLOCK: tl.constexpr):
    """How many weights are at least `cut`, and their sum."""
    offs = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.int64)
    for start in range(0, V, BLOCK):
        weights = _weights_at(p_logits, start, offs, V, largest, divisor, ONE)
        kept = weights >= cut
        count += kept.to(tl.int32)
        mass += tl.where(kept, weights.to(tl.int64), 0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def _raise_cut(
    p_logits,
    p_held,  # [HELD] float32, scratch
    V,
    largest,
    divisor,
    cut,
    count,
    mass,
    wanted,
    BY_MASS: tl.constexpr,
    ONE: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
):
    """The largest cut that still keeps `wanted` weights, or mass; `cut` keeps enough: `count` and `mass`."""
    low = cut.to(tl.int32, bitcast=True)
    high = (cut * 0.0 + ONE).to(tl.int32, bitcast=True) + 1
    low_count = count
    high_count = count * 0
    high_mass = mass * 0
    while (high - low > 1) & (low_count - high_count > HELD):
        middle = low + (high - low) // 2
        count, mass = _measure(p_logits, V, largest, divisor, middle.to(tl.float32, bitcast=True), ONE, BLOCK)
        enough = mass.to(tl.float64) >= wanted if BY_MASS else count >= wanted
        low = tl.where(enough, middle, low)
        low_count = tl.where(enough, count, low_count)
        high = tl.where(enough, high, middle)
        high_count = tl.where(enough, high_count, count)
        high_mass = tl.where(enough, high_mass, mass)
    if high - low > 1:
        offs = tl.arange(0, BLOCK)
        least = low.to(tl.float32, bitcast=True)
        beyond = high.to(tl.float32, bitcast=True)
        held = 0
        for start in range(0, V, BLOCK):
            weights = _weights_at(p_logits, start, offs, V, largest, divisor, ONE)
            between = ((weights >= least) & (weights < beyond)).to(tl.int32)
            tl.store(p_held + held + tl.cumsum(between, 0) - 1, weights, mask=between > 0)
            held += tl.sum(between, 0)
        # What other threads of this program stored is read next.
        tl.debug_barrier()
        offs_held = tl.arange(0, HELD)
        keys = tl.load(p_held + offs_held, mask=offs_held < held, other=-1.0)
        values = keys.to(tl.int64)
        while high - low > 1:
            middle = low + (high - low) // 2
            kept = keys >= middle.to(tl.float32, bitcast=True)
            if BY_MASS:
                enough = (tl.sum(tl.where(kept, values, 0), 0) + high_mass).to(tl.float64) >= wanted
            else:
                enough = tl.sum(kept.to(tl.int32), 0) + high_count >= wanted
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle)
        tl.debug_barrier()
    # Weights are compared as integers: what has the same integer part as the last one kept is kept.
    return tl.floor(low.to(tl.float32, bitcast=True))


@triton.jit
def _sample_kernel(
    logits_ptr,  # [S, V]
    temperature_ptr,  # [S]
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    uniform_ptr,
    held_ptr,  # [S, HELD]
    out_ptr,  # [S] int64
    V,
    logits_stride,
    INVALID: tl.constexpr,
    ONE: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
):
    i_s = tl.program_id(0).to(tl.int64)
    offs = tl.arange(0, BLOCK)
    p_logits = logits_ptr + i_s * logits_stride
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    nan = tl.zeros([BLOCK], tl.int32)
    for start in range(0, V, BLOCK):
        b_logits = tl.load(p_logits + start + offs, mask=start + offs < V, other=float("-inf"))
        nan += (b_logits != b_logits).to(tl.int32)
        better = b_logits > best
        best = tl.where(better, b_logits, best)
        place = tl.where(better, start + offs, place)
    largest = tl.max(best, 0)
    invalid = tl.sum(nan, 0) > 0
    greedy = tl.min(tl.where(best == largest, place, V), 0)
    temperature = tl.load(temperature_ptr + i_s)
    tl.store(out_ptr + i_s, tl.where(invalid, INVALID, greedy).to(tl.int64))
    if (temperature > 0) & (invalid == 0):
        top_k = tl.load(top_k_ptr + i_s).to(tl.int32)
        top_p = tl.load(top_p_ptr + i_s)
        # Exact: a float32 share of a power of two, rounded up to a whole number.
        cut = tl.maximum(tl.ceil(tl.load(min_p_ptr + i_s) * ONE), 1.0)
        count, mass = _measure(p_logits, V, largest, temperature, cut, ONE, BLOCK)
        p_held = held_ptr + i_s * HELD
        if (top_k > 0) & (count > top_k):
            cut = _raise_cut(
                p_logits, p_held, V, largest, temperature, cut, count, mass, top_k, False, ONE, BLOCK, HELD
            )
            count, mass = _measure(p_logits, V, largest, temperature, cut, ONE, BLOCK)
        if top_p < 1:
            wanted = top_p.to(tl.float64) * mass.to(tl.float64)
            cut = _raise_cut(
                p_logits, p_held, V, largest, temperature, cut, count, mass, wanted, True, ONE, BLOCK, HELD
            )
            count, mass = _measure(p_logits, V, largest, temperature, cut, ONE, BLOCK)
        share = tl.load(uniform_ptr + i_s).to(tl.float64) / ONE
        target = tl.minimum((share * mass.to(tl.float64)).to(tl.int64), mass - 1)
        running = mass * 0
        before = mass * 0
        found = greedy * 0
        for start in range(0, V, BLOCK):
            weights = _weights_at(p_logits, start, offs, V, largest, temperature, ONE)
            passed = running + tl.sum(tl.where(weights >= cut, weights.to(tl.int64), 0), 0)
            hit = (running <= target) & (passed > target)
            found = tl.where(hit, start, found)
            before = tl.where(hit, running, before)
            running = passed
        weights = _weights_at(p_logits, found, offs, V, largest, temperature, ONE)
        passed = before + tl.cumsum(tl.where(weights >= cut, weights.to(tl.int64), 0), 0)
        chosen = found + tl.sum((passed <= target).to(tl.int32), 0)
        # A row without any weight (all -inf) has no choice to make.
        tl.store(out_ptr + i_s, tl.where(mass > 0, chosen, 0).to(tl.int64))


def launch_sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    *,
    one: int,
    invalid: int,
    block: int = _BLOCK,
    held: int = _HELD,
) -> Tensor:
    """As kernels.sample.sample_ref.

    Args:
        one: weight of the likeliest token, a power of two.
        invalid: answer for a row with a NaN.
        block: tokens a program looks at together.
        held: tokens it holds for the last part of the search.

    Returns:
        [S] int64.
    """
    S, V = logits.shape
    if logits.dtype is not torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits: {logits.dtype}, strides {logits.stride()}; expected float32 rows")
    block = min(block, triton.next_power_of_2(V))
    out = torch.empty(S, dtype=torch.int64, device=logits.device)
    _sample_kernel[(S,)](
        logits_ptr=logits,
        temperature_ptr=temperature,
        top_k_ptr=top_k,
        top_p_ptr=top_p,
        min_p_ptr=min_p,
        uniform_ptr=uniform,
        held_ptr=torch.empty(S, held, dtype=torch.float32, device=logits.device),
        out_ptr=out,
        V=V,
        logits_stride=logits.stride(0),
        INVALID=invalid,
        ONE=float(one),
        BLOCK=block,
        HELD=held,
        num_warps=16 if block >= 4096 else 4,
    )
    return out
