"""The choice of kernels/sample.py on a card: four launches over chunks of a row, no sort, no host synchronisation.

1. Each chunk's largest logit. 2. Its weights above some fixed rungs. 3. The weights above the highest rung that is
surely below the cut are packed. 4. One program a row finds the cut among those by bisection over float32 patterns,
and the token (kernels/sample_search.py). Rows that need no cut skip what they do not need. Called by sample.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.sample_search import raise_cut, sum_above, weight_index

CHUNK = 4096
_HELD = 8192
_RUNGS = 8


@triton.jit
def weights_of(p_logits, offs, V, largest, divisor, ONE: tl.constexpr):
    """Float32 weights of some tokens, 0 beyond the row; their integer parts are the weights proper."""
    b_logits = tl.load(p_logits + offs, mask=offs < V, other=float("-inf"))
    weights = tl.exp((b_logits - largest) / divisor) * ONE
    return tl.where(weights == weights, weights, 0.0)


@triton.jit
def _rung(i, min_p, ONE: tl.constexpr):
    """The least weight above rung `i`: min_p's for 0, then higher and higher shares of the largest."""
    # Exact: a float32 share of a power of two, rounded up to a whole number.
    lowest = tl.maximum(tl.ceil(min_p * ONE), 1.0)
    return tl.where(i == 0, lowest, tl.maximum(lowest, tl.exp(-18.0 / tl.maximum(i, 1)) * ONE))


@triton.jit
def _chunk_top_kernel(logits_ptr, tops_ptr, places_ptr, V, C, logits_stride, CHUNK: tl.constexpr):
    """tops, places [S, C]: a chunk's largest logit and the lowest token that has it; token -1: a NaN is there."""
    i_c = tl.program_id(0)
    i_s = tl.program_id(1).to(tl.int64)
    offs = i_c * CHUNK + tl.arange(0, CHUNK)
    b_logits = tl.load(logits_ptr + i_s * logits_stride + offs, mask=offs < V, other=float("-inf"))
    nan = tl.sum((b_logits != b_logits).to(tl.int32), 0)
    top = tl.max(b_logits, 0)
    place = tl.min(tl.where(b_logits == top, offs, V), 0)
    tl.store(tops_ptr + i_s * C + i_c, top)
    tl.store(places_ptr + i_s * C + i_c, tl.where(nan > 0, -1, place))


@triton.jit
def _chunk_rungs_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    tops_ptr,
    counts_ptr,  # [S, C, RUNGS] int32
    masses_ptr,  # [S, C, RUNGS] int64
    V,
    C,
    logits_stride,
    ONE: tl.constexpr,
    CHUNK: tl.constexpr,
    C_BLOCK: tl.constexpr,
    RUNGS: tl.constexpr,
):
    """How many weights of a chunk lie above each rung, and their sum."""
    i_c = tl.program_id(0)
    i_s = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + i_s)
    if temperature > 0:
        offs_c = tl.arange(0, C_BLOCK)
        largest = tl.max(tl.load(tops_ptr + i_s * C + offs_c, mask=offs_c < C, other=float("-inf")), 0)
        offs = i_c * CHUNK + tl.arange(0, CHUNK)
        weights = weights_of(logits_ptr + i_s * logits_stride, offs, V, largest, temperature, ONE)
        values = weights.to(tl.int64)
        min_p = tl.load(min_p_ptr + i_s)
        search = (tl.load(top_k_ptr + i_s) > 0) | (tl.load(top_p_ptr + i_s) < 1)
        p_out = (i_s * C + i_c) * RUNGS
        for i in range(tl.where(search, RUNGS, 1)):
            above = weights >= _rung(i, min_p, ONE)
            tl.store(counts_ptr + p_out + i, tl.sum(above.to(tl.int32), 0))
            tl.store(masses_ptr + p_out + i, tl.sum(tl.where(above, values, 0), 0))


@triton.jit
def _chosen_rung(p_counts, p_masses, C, top_k, top_p, C_BLOCK: tl.constexpr, RUNGS: tl.constexpr):
    """The highest rung below the cut: of top_k, else of top_p; and what lies above rung 0."""
    offs_c = tl.arange(0, C_BLOCK)
    offs_r = tl.arange(0, RUNGS)
    offs = offs_c[:, None] * RUNGS + offs_r[None, :]
    mask = (offs_c < C)[:, None]
    counts = tl.sum(tl.load(p_counts + offs, mask=mask, other=0), 0)
    masses = tl.sum(tl.load(p_masses + offs, mask=mask, other=0), 0)
    count = tl.sum(tl.where(offs_r == 0, counts, 0), 0)
    mass = tl.sum(tl.where(offs_r == 0, masses, 0), 0)
    by_count = (top_k > 0) & (count > top_k)
    enough_mass = masses.to(tl.float64) >= top_p.to(tl.float64) * mass.to(tl.float64)
    enough = (by_count & (counts >= top_k)) | ((by_count == 0) & enough_mass)
    # Rungs rise, so those that keep enough come first.
    return tl.maximum(tl.sum(enough.to(tl.int32), 0) - 1, 0), count, mass


@triton.jit
def _pack_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    tops_ptr,
    counts_ptr,
    masses_ptr,
    keys_ptr,  # [S, V] float32
    V,
    C,
    logits_stride,
    ONE: tl.constexpr,
    CHUNK: tl.constexpr,
    C_BLOCK: tl.constexpr,
    RUNGS: tl.constexpr,
):
    """Write the weights above the chosen rung one after the other, in the order of the tokens."""
    i_c = tl.program_id(0)
    i_s = tl.program_id(1).to(tl.int64)
    temperature = tl.load(temperature_ptr + i_s)
    top_k = tl.load(top_k_ptr + i_s).to(tl.int32)
    top_p = tl.load(top_p_ptr + i_s)
    if (temperature > 0) & ((top_k > 0) | (top_p < 1)):
        offs_c = tl.arange(0, C_BLOCK)
        largest = tl.max(tl.load(tops_ptr + i_s * C + offs_c, mask=offs_c < C, other=float("-inf")), 0)
        p_counts = counts_ptr + i_s * C * RUNGS
        rung, _count, _mass = _chosen_rung(
            p_counts, masses_ptr + i_s * C * RUNGS, C, top_k, top_p, C_BLOCK, RUNGS
        )
        before = tl.sum(tl.load(p_counts + offs_c * RUNGS + rung, mask=offs_c < i_c, other=0), 0)
        offs = i_c * CHUNK + tl.arange(0, CHUNK)
        weights = weights_of(logits_ptr + i_s * logits_stride, offs, V, largest, temperature, ONE)
        above = (weights >= _rung(rung, tl.load(min_p_ptr + i_s), ONE)).to(tl.int32)
        tl.store(keys_ptr + i_s * V + before + tl.cumsum(above, 0) - 1, weights, mask=above > 0)


@triton.jit
def _choose_kernel(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    uniform_ptr,
    tops_ptr,
    places_ptr,
    counts_ptr,
    masses_ptr,
    keys_ptr,
    held_ptr,  # [S, HELD] float32
    out_ptr,  # [S] int64
    cuts_ptr,  # [S] float32
    kept_ptr,  # [S] int64
    V,
    C,
    logits_stride,
    INVALID: tl.constexpr,
    ONE: tl.constexpr,
    CHUNK: tl.constexpr,
    C_BLOCK: tl.constexpr,
    RUNGS: tl.constexpr,
    HELD: tl.constexpr,
):
    """The token of one row, its least weight to keep, and the mass that is kept: 0 where nothing is drawn."""
    i_s = tl.program_id(0).to(tl.int64)
    offs_c = tl.arange(0, C_BLOCK)
    c_mask = offs_c < C
    tops = tl.load(tops_ptr + i_s * C + offs_c, mask=c_mask, other=float("-inf"))
    places = tl.load(places_ptr + i_s * C + offs_c, mask=c_mask, other=V)
    largest = tl.max(tops, 0)
    invalid = tl.min(places, 0) < 0
    greedy = tl.min(tl.where(c_mask & (tops == largest), places, V), 0)
    temperature = tl.load(temperature_ptr + i_s)
    token = tl.where(invalid, INVALID, greedy)
    if (temperature > 0) & (invalid == 0):
        top_k = tl.load(top_k_ptr + i_s).to(tl.int32)
        top_p = tl.load(top_p_ptr + i_s)
        min_p = tl.load(min_p_ptr + i_s)
        p_counts = counts_ptr + i_s * C * RUNGS
        p_masses = masses_ptr + i_s * C * RUNGS
        share = tl.load(uniform_ptr + i_s).to(tl.float64) / ONE
        rung = 0
        cut = _rung(0, min_p, ONE)
        first = tl.sum(tl.load(p_masses + offs_c * RUNGS, mask=c_mask, other=0), 0)
        target = tl.minimum((share * first.to(tl.float64)).to(tl.int64), first - 1)
        mass = first
        search = (top_k > 0) | (top_p < 1)
        if search:
            rung, count, mass = _chosen_rung(p_counts, p_masses, C, top_k, top_p, C_BLOCK, RUNGS)
            packed = tl.sum(tl.load(p_counts + offs_c * RUNGS + rung, mask=c_mask, other=0), 0)
            above = tl.sum(tl.load(p_masses + offs_c * RUNGS + rung, mask=c_mask, other=0), 0)
            cut = _rung(rung, min_p, ONE)
            p_keys = keys_ptr + i_s * V
            p_held = held_ptr + i_s * HELD
            if (top_k > 0) & (count > top_k):
                cut = raise_cut(p_keys, p_held, packed, cut, packed, above, top_k, False, ONE, CHUNK, HELD)
                _count, mass = sum_above(p_keys, packed, cut, CHUNK)
            if top_p < 1:
                count, above = sum_above(p_keys, packed, cut, CHUNK)
                wanted = top_p.to(tl.float64) * mass.to(tl.float64)
                cut = raise_cut(p_keys, p_held, packed, cut, count, above, wanted, True, ONE, CHUNK, HELD)
            _count, mass = sum_above(p_keys, packed, cut, CHUNK)
            target = tl.minimum((share * mass.to(tl.float64)).to(tl.int64), mass - 1)
            # Where among the packed weights the running sum passes the target: so many of them come before.
            index = weight_index(p_keys, packed, cut, target, CHUNK)
            parts = tl.load(p_counts + offs_c * RUNGS + rung, mask=c_mask, other=0).to(tl.int64)
            target = index
        else:
            parts = tl.load(p_masses + offs_c * RUNGS, mask=c_mask, other=0)
        # The chunk in which the running mass, or number of packed weights, passes the target; then the token.
        chunk = tl.sum((c_mask & (tl.cumsum(parts, 0) <= target)).to(tl.int32), 0)
        before = tl.sum(tl.where(offs_c < chunk, parts, 0), 0)
        offs = chunk * CHUNK + tl.arange(0, CHUNK)
        weights = weights_of(logits_ptr + i_s * logits_stride, offs, V, largest, temperature, ONE)
        steps = tl.where(search, 1, weights.to(tl.int64))
        passed = before + tl.cumsum(tl.where(weights >= _rung(rung, min_p, ONE), steps, 0), 0)
        chosen = chunk * CHUNK + tl.sum((passed <= target).to(tl.int32), 0)
        # A row without any weight (all -inf) has no choice to make.
        token = tl.where(mass > 0, chosen, 0)
        tl.store(cuts_ptr + i_s, cut)
        tl.store(kept_ptr + i_s, mass)
    else:
        tl.store(kept_ptr + i_s, 0)
    tl.store(out_ptr + i_s, token.to(tl.int64))


@dataclass(frozen=True, slots=True)
class Choice:
    """Tokens, and what they were drawn from."""

    tokens: Tensor  # [S] int64
    tops: Tensor  # [S, C] float32: the largest logit of each chunk
    cuts: Tensor  # [S] float32: the least weight that was kept; undefined where `kept` is 0
    kept: Tensor  # [S] int64: sum of the weights kept; 0 where nothing was drawn: greedy, NaN


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
    chunk: int = CHUNK,
    held: int = _HELD,
) -> Choice:
    """Tokens as of kernels.sample.sample_ref.

    Args:
        one: weight of the likeliest token, a power of two.
        invalid: answer for a row with a NaN.
        chunk: tokens of a row that a program looks at.
        held: tokens that the last part of the search holds in registers.
    """
    S, V = logits.shape
    if logits.dtype is not torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits: {logits.dtype}, strides {logits.stride()}; expected float32 rows")
    C, device = triton.cdiv(V, chunk), logits.device
    out = torch.empty(S, dtype=torch.int64, device=device)
    tops = torch.empty(S, C, dtype=torch.float32, device=device)
    places = torch.empty(S, C, dtype=torch.int32, device=device)
    counts = torch.empty(S, C, _RUNGS, dtype=torch.int32, device=device)
    masses = torch.empty(S, C, _RUNGS, dtype=torch.int64, device=device)
    cuts = torch.empty(S, dtype=torch.float32, device=device)
    kept = torch.empty(S, dtype=torch.int64, device=device)
    keys = torch.empty(S, V, dtype=torch.float32, device=device)
    row = {"logits_ptr": logits, "V": V, "C": C, "logits_stride": logits.stride(0), "CHUNK": chunk}
    _chunk_top_kernel[(C, S)](**row, tops_ptr=tops, places_ptr=places, num_warps=4)
    row |= {
        "temperature_ptr": temperature,
        "top_k_ptr": top_k,
        "top_p_ptr": top_p,
        "min_p_ptr": min_p,
        "tops_ptr": tops,
        "counts_ptr": counts,
        "masses_ptr": masses,
        "ONE": float(one),
        "C_BLOCK": triton.next_power_of_2(C),
        "RUNGS": _RUNGS,
    }
    _chunk_rungs_kernel[(C, S)](**row, num_warps=4)
    _pack_kernel[(C, S)](**row, keys_ptr=keys, num_warps=4)
    _choose_kernel[(S,)](
        **row,
        uniform_ptr=uniform,
        places_ptr=places,
        keys_ptr=keys,
        held_ptr=torch.empty(S, held, dtype=torch.float32, device=device),
        out_ptr=out,
        cuts_ptr=cuts,
        kept_ptr=kept,
        INVALID=invalid,
        HELD=held,
        num_warps=16 if chunk >= 4096 else 4,
    )
    return Choice(out, tops, cuts, kept)
