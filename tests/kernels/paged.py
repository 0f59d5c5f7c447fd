"""Ragged steps over a paged cache with shuffled blocks, for the tests of the attention kernels."""

from collections.abc import Sequence

import torch

from headrace.kernels.attention_plan import AttentionPlan, plan_device
from headrace.kernels.paged_plan import ShortRows


def ragged_plan(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    device: torch.device,
    *,
    block_size: int = 16,
    num_decodes: int = 0,
    split_size: int | None = None,
    capacity: int = 0,
    num_short: int = 0,
) -> tuple[AttentionPlan, int]:
    """A plan whose rows own shuffled blocks, and the number of blocks; block 0 is nobody's.

    The first `num_short` rows, if any, are short ones beside long ones.
    """
    needed = [-(-length // block_size) for length in context_lens]
    num_blocks = sum(needed) + 4
    order = (torch.randperm(num_blocks - 1) + 1).int()
    tables = torch.zeros(len(query_lens), max(*needed, 1), dtype=torch.int32)
    at = 0
    for row, count in enumerate(needed):
        tables[row, :count] = order[at : at + count]
        at += count
    starts = torch.tensor([0, *query_lens]).cumsum(0).int()
    few = query_lens[:num_short]
    plan = plan_device(
        starts.to(device),
        torch.tensor(context_lens, dtype=torch.int32, device=device),
        tables.to(device),
        num_decodes,
        max(query_lens),
        max(capacity, *context_lens),
        sum(context_lens[max(num_decodes, num_short) :]),
        split_size,
        ShortRows(num_short, sum(few), max(few)) if few else None,
    )
    return plan, num_blocks
