"""Sizes and inputs that kernel tests share."""

from collections.abc import Sequence

import torch
from torch import Tensor

from headrace.kernels.attention_plan import AttentionPlan, plan_attention

SIZES = [1, 7, 63, 129]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def normal(*shape: int, dtype: torch.dtype, device: torch.device, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=device) * scale).to(dtype)


def rotations(tokens: int, pairs: int, device: torch.device) -> Tensor:
    """[T, 1, pairs] complex64 of unit length."""
    angles = torch.rand(tokens, 1, pairs, device=device) * 6.3
    return torch.complex(angles.cos(), angles.sin())


def ragged_plan(
    rows: Sequence[tuple[int, int]], block_size: int, num_blocks: int, device: torch.device
) -> tuple[AttentionPlan, int]:
    """Rows of (query tokens, context length) over shuffled disjoint blocks; the plan and the number of tokens."""
    counts = [tokens for tokens, _ in rows]
    lengths = [length for _, length in rows]
    needed = [-(-length // block_size) for length in lengths]
    blocks = (torch.randperm(num_blocks - 1)[: sum(needed)] + 1).split(needed)
    tables = torch.zeros(len(rows), max(needed), dtype=torch.int32)
    for table, own in zip(tables, blocks, strict=True):
        table[: len(own)] = own
    starts = torch.tensor([0, *counts]).cumsum(0)
    plan = plan_attention(
        starts.int().to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        tables.to(device),
        counts.count(1),
        block_size,
        max(counts),
        max(lengths),
    )
    return plan, sum(counts)


def poison_unused(cache: Tensor, plan: AttentionPlan, block_axis: int) -> None:
    """NaN wherever no row has a token: an operation that reads it shows."""
    block_size = cache.shape[block_axis + 1]
    cells = cache.movedim((block_axis, block_axis + 1), (0, 1)).flatten(0, 1)
    used = torch.zeros(cells.shape[0], dtype=torch.bool, device=cache.device)
    for table, length in zip(plan.block_tables.long(), plan.context_lens.tolist(), strict=True):
        positions = torch.arange(length, device=cache.device)
        used[table[positions // block_size] * block_size + positions % block_size] = True
    kept = torch.where(used.view(-1, *[1] * (cells.dim() - 1)), cells, torch.full_like(cells, float("nan")))
    shape = (cache.shape[block_axis], block_size, *kept.shape[1:])
    cache.copy_(kept.view(shape).movedim((0, 1), (block_axis, block_axis + 1)))
