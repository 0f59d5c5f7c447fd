"""The (token, expert) pairs of a step in the order of their experts, in tiles that hold one expert each.

No host synchronisation: the number of tiles stays on the card, arrays are as long as the worst case.
Pairs of one expert keep their order, so the result depends on the ids alone. Called by the expert products.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from headrace.kernels.dependent_launch import dependent, wait_and_release

_ONE_LAUNCH = 4096
_CHUNK = 256
_COLUMNS = 8  # experts of a program that sums over the chunks


@dataclass(frozen=True, slots=True)
class ExpertOrder:
    """P pairs, number t * K + k for the k-th expert of token t, in tiles of `block` places."""

    pairs: Tensor  # [max_tiles * block] int32; P = an empty place
    tile_experts: Tensor  # [max_tiles] int32
    num_tiles: Tensor  # [1] int32; what lies behind is unwritten
    max_tiles: int
    block: int


@triton.jit(do_not_specialize=["P"])
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
    PDL: tl.constexpr,
):
    wait_and_release(PDL)
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


@triton.jit(do_not_specialize=["P"])
def _expert_count_kernel(ids_ptr, counts_ptr, P, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """counts [chunks, BINS]: pairs of each expert in a chunk."""
    i_c = tl.program_id(0)
    offs = i_c * CHUNK + tl.arange(0, CHUNK)
    b_ids = tl.load(ids_ptr + offs, mask=offs < P, other=0)
    counts = tl.histogram(b_ids.to(tl.int32), BINS, mask=offs < P)
    tl.store(counts_ptr + i_c * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=["C"])
def _expert_prefix_kernel(
    counts_ptr,  # [C, BINS]
    earlier_ptr,  # [C, BINS]: pairs of each expert in the chunks before
    totals_ptr,  # [BINS]
    C,
    BINS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    bins = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    totals = tl.zeros([COLUMNS], tl.int32)
    for start in range(0, C, ROWS):
        rows = start + tl.arange(0, ROWS)
        at = rows[:, None] * BINS + bins[None, :]
        part = tl.load(counts_ptr + at, mask=(rows < C)[:, None], other=0)
        tl.store(earlier_ptr + at, tl.cumsum(part, 0) - part + totals[None, :], mask=(rows < C)[:, None])
        totals += tl.sum(part, 0)
    tl.store(totals_ptr + bins, totals)


@triton.jit(do_not_specialize=["P", "C", "max_tiles"])
def _expert_place_kernel(
    ids_ptr,  # [P] int64
    earlier_ptr,  # [C, BINS]; the chunk's own row is overwritten
    totals_ptr,  # [BINS]
    pairs_ptr,
    tile_experts_ptr,
    num_tiles_ptr,
    P,
    E,
    C,
    max_tiles,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Each chunk places its own pairs; the chunks share the work of the tiles' experts and empty places."""
    i_c = tl.program_id(0)
    bins = tl.arange(0, BINS)
    rows = tl.arange(0, ROWS)
    counts = tl.load(totals_ptr + bins)
    tiles = tl.where(bins < E, (counts + BLOCK - 1) // BLOCK, 0)
    ends = tl.cumsum(tiles, 0)
    first = (ends - tiles) * BLOCK
    if i_c == 0:
        tl.store(num_tiles_ptr, tl.sum(tiles, 0))
    offs = i_c * CHUNK + tl.arange(0, CHUNK)
    b_ids = tl.load(ids_ptr + offs, mask=offs < P, other=-1).to(tl.int32)
    # Of each pair: the place of its expert's first in this chunk, plus how many of the chunk come before it.
    p_places = earlier_ptr + i_c * BINS
    places = first + tl.load(p_places + bins)
    tl.debug_barrier()
    tl.store(p_places + bins, places)
    tl.debug_barrier()
    place = tl.load(p_places + b_ids, mask=offs < P, other=0)
    for other in range(i_c * CHUNK, (i_c + 1) * CHUNK, ROWS):
        o_ids = tl.load(ids_ptr + other + rows, mask=other + rows < P, other=-2).to(tl.int32)
        ahead = (b_ids[:, None] == o_ids[None, :]) & ((other + rows)[None, :] < offs[:, None])
        place += tl.sum(ahead.to(tl.int32), 1)
    tl.store(pairs_ptr + place, offs, mask=offs < P)
    for tile in range(i_c * ROWS, max_tiles, C * ROWS):
        offs_t = tile + rows
        i_e = tl.sum((ends[None, :] <= offs_t[:, None]).to(tl.int32), 1)
        tl.store(tile_experts_ptr + offs_t, i_e, mask=offs_t < tl.max(ends, 0))
    for expert in range(i_c, E, C):
        full = tl.sum(tl.where(bins == expert, first + counts, 0), 0)
        end = tl.sum(tl.where(bins == expert, ends * BLOCK, 0), 0)
        rest = full + tl.arange(0, BLOCK)
        tl.store(pairs_ptr + rest, P, mask=rest < end)


def launch_expert_sort(
    ids: Tensor, num_experts: int, block: int, one_launch: int = _ONE_LAUNCH
) -> ExpertOrder:
    """Sort [T, K] expert ids below `num_experts`, into tiles of `block`.

    Up to `one_launch` pairs a program for each expert looks at all of them; more are counted by chunks first.
    """
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
    outputs = {
        "ids_ptr": ids,
        "pairs_ptr": order.pairs,
        "tile_experts_ptr": order.tile_experts,
        "num_tiles_ptr": order.num_tiles,
        "P": P,
        "E": num_experts,
        "BLOCK": block,
    }
    if one_launch >= P:
        chunk = min(max(triton.next_power_of_2(P), 128), 2048)
        bins = max(triton.next_power_of_2(num_experts + 1), 128)
        _expert_sort_kernel[(num_experts,)](**outputs, BINS=bins, CHUNK=chunk, num_warps=4, **dependent(ids))
        return order
    chunks, bins = triton.cdiv(P, _CHUNK), max(triton.next_power_of_2(num_experts), 128)
    counts = torch.empty(chunks, bins, dtype=torch.int32, device=ids.device)
    _expert_count_kernel[(chunks,)](ids_ptr=ids, counts_ptr=counts, P=P, BINS=bins, CHUNK=_CHUNK, num_warps=4)
    earlier, totals = torch.empty_like(counts), counts.new_empty(bins)
    _expert_prefix_kernel[(bins // _COLUMNS,)](
        counts_ptr=counts,
        earlier_ptr=earlier,
        totals_ptr=totals,
        C=chunks,
        BINS=bins,
        COLUMNS=_COLUMNS,
        ROWS=128,
        num_warps=4,
    )
    _expert_place_kernel[(chunks,)](
        **outputs,
        earlier_ptr=earlier,
        totals_ptr=totals,
        C=chunks,
        max_tiles=max_tiles,
        BINS=bins,
        CHUNK=_CHUNK,
        ROWS=32,
        num_warps=8,
    )
    return order
