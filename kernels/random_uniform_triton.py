"""The counter-based random numbers of random_uniform on a card, equal to it bit by bit."""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 128


@triton.jit
def _mix(x):
    # SplitMix64's finaliser; the constants are given in signed 64 bits, products wrap.
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _random_uniform_kernel(
    seeds_ptr,  # [S] int64
    positions_ptr,  # [S] int64
    out_ptr,  # [S] int64
    S,
    PURPOSE: tl.constexpr,
    FRACTION_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < S
    seed = tl.load(seeds_ptr + offs, mask=mask, other=0).to(tl.uint64, bitcast=True)
    position = tl.load(positions_ptr + offs, mask=mask, other=0).to(tl.uint64, bitcast=True)
    gamma = tl.full([BLOCK], 0x9E3779B97F4A7C15, tl.uint64)
    hashed = _mix(seed + (PURPOSE + 1) * gamma)
    hashed = _mix(hashed + (position + 1) * gamma)
    out = hashed >> (64 - FRACTION_BITS)
    tl.store(out_ptr + offs, out.to(tl.int64, bitcast=True), mask=mask)


def launch_random_uniform(seeds: Tensor, positions: Tensor, purpose: int, fraction_bits: int) -> Tensor:
    """[S] int64 each -> [S] int64 below 2**fraction_bits."""
    for name, value in (("seeds", seeds), ("positions", positions)):
        if value.dtype is not torch.int64 or not value.is_contiguous():
            raise ValueError(f"{name}: {value.dtype}, strides {value.stride()}; expected contiguous int64")
    S = seeds.shape[0]
    out = torch.empty(S, dtype=torch.int64, device=seeds.device)
    _random_uniform_kernel[(triton.cdiv(S, _BLOCK),)](
        seeds_ptr=seeds,
        positions_ptr=positions,
        out_ptr=out,
        S=S,
        PURPOSE=purpose,
        FRACTION_BITS=fraction_bits,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return out
