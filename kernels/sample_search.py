"""Searches among packed float32 weights: the least to keep, and where a share of the mass lies.

Device functions, called by sample_triton.
"""

import triton
import triton.language as tl


@triton.jit
def sum_above(p_keys, n, cut, BLOCK: tl.constexpr):
    """How many of the `n` weights are at least `cut`, and the sum of their integer parts."""
    offs = tl.arange(0, BLOCK)
    count = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.int64)
    for start in range(0, n, BLOCK):
        keys = tl.load(p_keys + start + offs, mask=start + offs < n, other=0.0)
        kept = keys >= cut
        count += kept.to(tl.int32)
        mass += tl.where(kept, keys.to(tl.int64), 0)
    return tl.sum(count, 0), tl.sum(mass, 0)


@triton.jit
def weight_index(p_keys, n, cut, target, BLOCK: tl.constexpr):
    """The first place at which the running sum of the weights kept by `cut` passes `target`; int64."""
    offs = tl.arange(0, BLOCK)
    running = target * 0
    before = target * 0
    found = n * 0
    for start in range(0, n, BLOCK):
        keys = tl.load(p_keys + start + offs, mask=start + offs < n, other=0.0)
        passed = running + tl.sum(tl.where(keys >= cut, keys.to(tl.int64), 0), 0)
        hit = (running <= target) & (passed > target)
        found = tl.where(hit, start, found)
        before = tl.where(hit, running, before)
        running = passed
    keys = tl.load(p_keys + found + offs, mask=found + offs < n, other=0.0)
    passed = before + tl.cumsum(tl.where(keys >= cut, keys.to(tl.int64), 0), 0)
    return (found + tl.sum((passed <= target).to(tl.int32), 0)).to(tl.int64)


@triton.jit
def raise_cut(
    p_keys,  # [n] float32
    p_held,  # [HELD] float32, scratch
    n,
    cut,
    count,
    mass,
    wanted,
    BY_MASS: tl.constexpr,
    ONE: tl.constexpr,
    BLOCK: tl.constexpr,
    HELD: tl.constexpr,
):
    """The largest cut that still keeps `wanted` weights, or mass; `cut` keeps enough: `count` and `mass`.

    Over all weights until few enough lie between the bounds, then over those alone, held in registers.
    """
    low = cut.to(tl.int32, bitcast=True)
    high = (cut * 0.0 + ONE).to(tl.int32, bitcast=True) + 1
    low_count = count
    high_count = count * 0
    high_mass = mass * 0
    while (high - low > 1) & (low_count - high_count > HELD):
        middle = low + (high - low) // 2
        count, mass = sum_above(p_keys, n, middle.to(tl.float32, bitcast=True), BLOCK)
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
        for start in range(0, n, BLOCK):
            keys = tl.load(p_keys + start + offs, mask=start + offs < n, other=0.0)
            between = ((keys >= least) & (keys < beyond)).to(tl.int32)
            tl.store(p_held + held + tl.cumsum(between, 0) - 1, keys, mask=between > 0)
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
        # The scratch may be written again by the next search.
        tl.debug_barrier()
    # Weights are compared as integers: what has the same integer part as the last one kept is kept.
    return tl.floor(low.to(tl.float32, bitcast=True))
