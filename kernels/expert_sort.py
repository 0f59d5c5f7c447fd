"""The (token, expert) pairs of a step in the order of their experts, in tiles that hold one expert each.

One launch, no host synchronisation: the number of tiles stays on the card, arrays are as long as the worst case.
Pairs of one expert keep their order, so the result depends on the ids alone. Called by the expert products.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """P pairs, number t * K + k for the k-th expert of token t, in tiles of `block` places."""

    pairs: Tensor  # [max_tiles * block] int32; P = an empty place
    tile_experts: Tensor  # [max_tiles] int32
    num_tiles: Tensor  # [1] int32; what lies behind is unwritten
    max_tiles: int
    block: int


@triton.jit
def _expert_sort_kernel(
    ids_ptr,  # [P] int64
    pairs_ptr,
    tile_experts_ptr,
    num_tiles_ptr,
    P,
    E,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i_e = tl.program_id(0)
    offs = tl.arange(0, CHUNK)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, P, CHUNK):
        # Places beyond the end count in the last bin, which is no expert's.
        b_ids = tl.load(ids_ptr + start + offs, mask=start + offs < P, other=BINS - 1)
        counts += tl.histogram(b_ids.to(tl.int32), BINS)
    tiles = tl.where(bins < E, (counts + BLOCK - 1) // BLOCK, 0)
    first = tl.sum(tl.where(bins < i_e, tiles, 0), 0)
    own = tl.sum(tl.where(bins == i_e, tiles, 0), 0)
    if i_e == 0:
        tl.store(num_tiles_ptr, tl.sum(tiles, 0))
    if own > 0:
        for tile in range(0, own, BINS):
            tl.store(tile_experts_ptr + first + tile + bins, i_e, mask=tile + bins < own)
        place = first * BLOCK
        for start in range(0, P, CHUNK):
            b_ids = tl.load(ids_ptr + start + offs, mask=start + offs < P, other=BINS - 1)
            hit = (b_ids == i_e).to(tl.int32)
            tl.store(pairs_ptr + place + tl.cumsum(hit, 0) - 1, start + offs, mask=hit > 0)
            place += tl.sum(hit, 0)
        rest = place + tl.arange(0, BLOCK)
        tl.store(pairs_ptr + rest, P, mask=rest < (first + own) * BLOCK)


def launch_expert_sort(ids: Tensor, num_experts: int, block: int) -> ExpertOrder:
    """Sort [T, K] expert ids below `num_experts`, into tiles of `block`."""
    if ids.dtype is not torch.int64 or not ids.is_contiguous():
        raise ValueError(f"ids: {ids.dtype}, strides {ids.stride()}; expected contiguous int64")
    P = ids.numel()
    max_tiles = min(P, num_experts) + P // block
    order = ExpertOrder(
        pairs=torch.empty(max_tiles * block, dtype=torch.int32, device=ids.device),
        tile_experts=torch.empty(max_tiles, dtype=torch.int32, device=ids.device),
        num_tiles=torch.empty(1, dtype=torch.int32, device=ids.device),
        max_tiles=max_tiles,
        block=block,
    )
    chunk = min(max(triton.next_power_of_2(P), 128), 8192)
    _expert_sort_kernel[(num_experts,)](
        ids_ptr=ids,
        pairs_ptr=order.pairs,
        tile_experts_ptr=order.tile_experts,
        num_tiles_ptr=order.num_tiles,
        P=P,
        E=num_experts,
        BLOCK=block,
        BINS=max(triton.next_power_of_2(num_experts + 1), 128),
        CHUNK=chunk,
        num_warps=min(max(chunk // 512, 4), 16),
    )
    return order
